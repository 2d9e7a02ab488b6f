"""Batches to the trainer and its reports back: one epoch after the other, each from where the trainer's weights stand."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from orchestrator_svc.batch_message import batch_header, give_advantages
from orchestrator_svc.journal import JournalError, Recovery
from orchestrator_svc.run_parts import RunParts, group_name
from orchestrator_svc.scheduler import Batch, Group, OnStale, Reason
from orchestrator_svc.step_summary import StepSummary, summarise
from orchestrator_svc.trainer_link import EpochLostError
from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2, trainer_pb2
from sluice.versions import Version

__all__ = ["Training"]

log = structlog.get_logger(__name__)

_OUTSTANDING = 2
"""Batches at the trainer: one that is trained and one that waits. More would only grow older there."""


class Training:
    """Feeds one trainer until the last batch is applied.

    Args:
        parts: The run.
        requeue: Draws the task at a position again.
        on_step: Called after each applied batch.
    """

    def __init__(self, parts: RunParts, requeue: Callable[[int], None], on_step: Callable[[Version], None]) -> None:
        self._parts, self._requeue, self._on_step = parts, requeue, on_step
        self._at_trainer: set[int] = set()
        self._digest = ""
        self._last_step = time.monotonic()
        self._counted: Counter[str] = Counter()
        self._shares = parts.status.shares()

    @property
    def done(self) -> bool:
        """Whether the last batch is applied."""
        return self._parts.scheduler.applied >= self._parts.scheduler.max_steps

    async def run(self) -> None:
        """Open epochs and train until done.

        Raises:
            SluiceError: if the trainer is lost again and again, or refuses.
        """
        lost = 0
        while True:
            before = self._parts.scheduler.applied
            try:
                epoch = await self._open_epoch()
                before = self._parts.scheduler.applied
                await self._train(epoch)
            except* EpochLostError as group:
                reason = str(group.exceptions[0])
            else:
                return
            self._parts.scheduler.close_epoch()
            lost = lost + 1 if self._parts.scheduler.applied == before else 1
            if lost > self._parts.config.max_lost_epochs:
                raise SluiceError.unavailable("TRAINER_LOST", f"the trainer was lost {lost} times in a row: {reason}")
            log.warning("the trainer lost its epoch; opening another", epoch=self._parts.scheduler.epoch, reason=reason)

    async def _open_epoch(self) -> int:
        """Agree with the trainer on an epoch and on what its weights lack."""
        parts = self._parts
        self._at_trainer.clear()
        recovery = await parts.journal.recover()
        accepted = await parts.trainer.last_batch_in(recovery.present_epoch, recovery.applied)
        if accepted is None:
            await self._begin_epoch(await parts.journal.allot_epoch(), recovery)
        else:
            await self._rejoin_epoch(recovery, accepted)
        await self._account_for_past(recovery)
        log.info(
            "training from",
            version=str(Version(parts.scheduler.epoch, parts.scheduler.applied)),
            batches_to_send=len(parts.scheduler.batches),
        )
        parts.changed.notify()
        return parts.scheduler.epoch

    async def _rejoin_epoch(self, recovery: Recovery, accepted: int) -> None:
        """Continue the epoch of a trainer that lived on: it has the batches up to `accepted`, damaged here or not."""
        parts = self._parts
        lacking = recovery.after(recovery.applied)
        held = [pair for pair in lacking if pair[0].sequence_no <= accepted]
        lost = await self._readable_batches([pair for pair in lacking if pair[0].sequence_no > accepted])
        parts.scheduler.rejoin_epoch(recovery.present_epoch, recovery.applied, lost, held)
        parts.journal.keep_batches(recovery.applied, parts.scheduler.batches)
        await parts.journal.durable()
        self._at_trainer.update(batch.sequence_no for batch, _ in held)

    async def _begin_epoch(self, epoch: int, recovery: Recovery) -> None:
        parts = self._parts
        answer = await parts.trainer.begin_epoch(epoch)
        origin = Version.from_proto(answer.restored_version)
        if answer.next_sequence_no != origin.number + 1:
            raise SluiceError.failed_precondition(
                "WRONG_SEQUENCE_NO",
                f"the trainer restored version {origin} but expects batch {answer.next_sequence_no}: one batch makes one version",
            )
        lost = await self._readable_batches(recovery.after(origin.number))
        parts.scheduler.open_epoch(epoch, origin, lost)
        parts.journal.open_epoch(epoch, origin, parts.scheduler.batches)
        await parts.journal.durable()

    async def _account_for_past(self, recovery: Recovery) -> None:
        """Count the batches that the weights already hold although no process lived to note what became of them."""
        batches = recovery.unreported(self._parts.scheduler.applied)
        if batches:
            steps = await self._parts.trainer.past_steps(batches[0][0].sequence_no, batches[-1][0].sequence_no)
            for batch, _ in batches:
                await self._account_for(batch, steps.get(batch.sequence_no))

    async def _account_for(self, batch: Batch, step: trainer_pb2.StepReport | None) -> None:
        parts = self._parts
        records = await self._readable_records(batch)
        if step is None:
            trained, dropped = 0, {Reason.REPORT_LOST: len(records)}
            log.warning("nobody knows what became of a batch that the weights hold", batch=batch.batch_id)
        else:
            summary = summarise(step, records, parts.scheduler.lineage, parts.common.max_staleness)
            trained, dropped = summary.trained, dict(summary.dropped)
            version = Version.from_proto(step.policy_version)
            parts.status.step_finished(version, summary.metrics)
            await parts.recorder.step(version.number, summary.metrics, records, parts.scheduler.lineage)
            parts.recent.add(records)
        parts.scheduler.accounting.apply(batch.sequence_no, trained, dropped)
        parts.journal.apply_batch(batch.sequence_no, trained, dropped, parts.elapsed_s)
        for group in batch.groups:
            parts.forget_records(group)

    async def _readable_batches(self, batches: Sequence[tuple[Batch, list[Group]]]) -> list[tuple[Batch, list[Group]]]:
        """The batches without the groups that the journal cannot read."""
        return [(batch, [each for each in groups if await self._readable(each)]) for batch, groups in batches]

    async def _readable(self, group: Group) -> bool:
        """Return whether the journal still has a group's trajectories; if not, count them and draw the task again."""
        parts = self._parts
        try:
            await parts.journal.read_group(group.number)
        except JournalError as error:
            log.warning("a damaged group is dropped; its task is drawn again", group=group.number, error=str(error))
            parts.scheduler.accounting.drop(Reason.JOURNAL_DAMAGED, group.trajectories)
            parts.journal.drop(group.number, Reason.JOURNAL_DAMAGED, was_accepted=group.trajectories)
            self._requeue(group.position)
            return False
        return True

    async def _train(self, epoch: int) -> None:
        """Submit and follow side by side until done."""
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(self._submit(epoch)), tasks.create_task(self._follow(epoch))]
            while not self.done:
                await self._parts.changed.wait()
            for each in work:
                each.cancel()

    # Out: batches.

    async def _submit(self, epoch: int) -> None:
        parts = self._parts
        for batch in sorted(parts.scheduler.batches.values(), key=lambda each: each.sequence_no):
            if batch.sequence_no not in self._at_trainer:
                await self._send(batch, epoch)
        while True:
            batch = await self._next_batch()
            parts.journal.make_batch(batch)
            await self._send(batch, epoch)

    async def _next_batch(self) -> Batch:
        """Make the next batch as soon as the trainer has room for it and its groups are complete."""
        parts = self._parts
        while True:
            if len(self._at_trainer) < _OUTSTANDING:
                if stale := parts.scheduler.drop_stale():
                    self._drop_stale(stale)
                if (batch := parts.scheduler.make_batch()) is not None:
                    return batch
            await parts.changed.wait()

    def _drop_stale(self, groups: Sequence[Group]) -> None:
        """Groups came too late for every batch to come."""
        parts = self._parts
        versions = sorted({version for group in groups for version in group.versions})
        log.warning("groups are too old to be trained", groups=len(groups), versions=[str(each) for each in versions])
        for group in groups:
            parts.journal.drop(group.number, Reason.STALE, was_accepted=group.trajectories)
            parts.forget_records(group.number)
            if parts.config.on_stale == OnStale.REQUEUE.value:
                self._requeue(group.position)
        parts.changed.notify()

    async def _send(self, batch: Batch, epoch: int) -> None:
        parts = self._parts
        while len(self._at_trainer) >= _OUTSTANDING:
            await parts.changed.wait()
        records = await self._records(batch)
        give_advantages(parts.config.advantage, records)
        header = batch_header(
            batch,
            run=parts.common.run,
            epoch=epoch,
            trajectories=len(records),
            max_staleness=parts.common.max_staleness,
            tokenizer_digest=await self._tokenizer_digest(),
            sampler_dtype=parts.pool.sampler_dtype(),
            config=parts.config,
        )
        # What the trainer is given must be there to be given again.
        await parts.journal.durable()
        await parts.trainer.submit(header, [record.trajectory for record in records])
        # The report may have come before the answer.
        if batch.sequence_no > parts.scheduler.applied:
            self._at_trainer.add(batch.sequence_no)
        self._note_idle()

    async def _records(self, batch: Batch) -> list[orchestrator_pb2.TrajectoryRecord]:
        return [record for group in batch.groups for record in await self._parts.records(group)]

    async def _readable_records(self, batch: Batch) -> list[orchestrator_pb2.TrajectoryRecord]:
        """The trajectories of a batch without those that the journal cannot read; the trainer has them all."""
        records = []
        for group in batch.groups:
            try:
                records += await self._parts.records(group)
            except JournalError as error:
                log.warning("a trained group cannot be shown", group=group, error=str(error))
        return records

    async def _tokenizer_digest(self) -> str:
        while not self._digest:
            self._digest = self._parts.pool.tokenizer_digest()
            if not self._digest:
                await self._parts.changed.wait(1.0)
        return self._digest

    def _note_idle(self) -> None:
        self._parts.status.trainer_idle.set(not self._at_trainer, time.monotonic())

    # Back: reports.

    async def _follow(self, epoch: int) -> None:
        async for step in self._parts.trainer.steps(epoch, self._parts.scheduler.applied + 1):
            await self._take_in(step)
            if self.done:
                return

    async def _take_in(self, step: trainer_pb2.StepReport) -> None:
        """A batch was applied: count, record, tell."""
        parts, scheduler = self._parts, self._parts.scheduler
        batch = scheduler.batches.get(step.sequence_no)
        if batch is None:
            raise EpochLostError(f"the trainer applied batch {step.sequence_no}, which this run has not made")
        records = await self._readable_records(batch)
        summary = summarise(step, records, scheduler.lineage, parts.common.max_staleness)
        positions = {group_name(number): scheduler.groups[number].position for number in batch.groups}
        scheduler.apply(step.sequence_no, summary.trained, summary.dropped)
        parts.journal.apply_batch(step.sequence_no, summary.trained, summary.dropped, parts.elapsed_s)
        for number in batch.groups:
            parts.forget_records(number)
        if parts.config.on_stale == OnStale.REQUEUE.value:
            for name in sorted(summary.stale_groups):
                self._requeue(positions[name])
        self._at_trainer.discard(step.sequence_no)
        self._note_idle()
        parts.recent.add(records)
        await self._tell(Version.from_proto(step.policy_version), summary, records)
        parts.changed.notify()

    async def _tell(
        self, version: Version, summary: StepSummary, records: list[orchestrator_pb2.TrajectoryRecord]
    ) -> None:
        parts = self._parts
        metrics = {**summary.metrics, **self._since_last_step(), **parts.pool.update_metrics(version)}
        parts.status.step_finished(version, metrics)
        await parts.recorder.step(version.number, metrics, records, parts.scheduler.lineage)
        shown = {name: round(metrics[name], 4) for name in ("reward/mean", "staleness/mean") if name in metrics}
        log.info("step", version=str(version), trained=summary.trained, dropped=dict(summary.dropped), **shown)
        self._on_step(version)

    def _since_last_step(self) -> dict[str, float]:
        """Rates and counts of the time since the last applied batch."""
        now, counts = time.monotonic(), self._parts.engine.counts.of_policy()
        more, self._counted = counts - self._counted, counts
        idle, blocked, rollout_idle = (share.take(now) for share in self._shares)
        elapsed, self._last_step = now - self._last_step, now
        return {
            "time/step_s": elapsed,
            "tokens/generated": float(more["tokens"]),
            "tokens/generated_per_s": more["tokens"] / elapsed if elapsed > 0 else 0.0,
            "requests/count": float(more["requests"]),
            "requests/spanning": float(more["spanning"]),
            "load/trainer_idle": idle,
            "load/dispatch_blocked": blocked,
            "load/rollout_idle": rollout_idle,
        }
