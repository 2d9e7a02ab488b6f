"""From scored groups to applied batches: make a batch, submit it to the trainer, and record its outcome.

`Training` opens one epoch of the trainer after the other, each from where the trainer's weights stand. If a trainer loses its epoch, it
gets the batches that its checkpoint lacks again in the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import grpc
import numpy as np
import structlog

from orchestrator_svc.config import NO_ADVANTAGE, OrchestratorConfig
from orchestrator_svc.journal.facts import LedgerError, Reason, Stage
from orchestrator_svc.journal.ledger import Batch, Group
from orchestrator_svc.journal.records import Each, SharedRecord
from orchestrator_svc.journal.store import GroupDamagedError, Journal
from orchestrator_svc.run.curriculum import Curriculum
from orchestrator_svc.run.free_space import FreeSpace
from orchestrator_svc.run.live_settings import LEARNING_RATE
from orchestrator_svc.run.metrics import AppliedStep, reward_by_environment, summarise
from orchestrator_svc.run.recorder import Dropped, Recorder
from orchestrator_svc.run.scheduler import OnStale, Scheduler
from orchestrator_svc.run.setting_aside import BatchRefusedError, Found, refused, set_aside, too_large
from orchestrator_svc.run.status import RunStatus
from orchestrator_svc.run.trainer_link import RETRY_S, EpochLostError, TrainerLink, applied_fact, report_of
from sluice.advantages import ESTIMATORS, TRAINER_ESTIMATORS, Episode, UnfitRewardsError, advantages_by_episode
from sluice.clock import CLOCK, Clock
from sluice.config.decide import check_objective, check_sides
from sluice.digests import batch_digest, trajectory_digest
from sluice.limits import FLOAT32_MAX
from sluice.rpc import SluiceError
from sluice.sampling.pool import ReplicaPool
from sluice.tasks import Turn, run_to_end
from sluice.v1 import journal_pb2, trainer_pb2
from sluice.versions import Version, sampled_tokens

log = structlog.get_logger(__name__)

_MOST_AT_TRAINER = 2
"""Most batches at the trainer: one in training and one that waits. Further batches would only grow older there."""

_BATCH_TOO_LARGE = (
    "the groups of the batch are larger together than the limits of a batch (docs/limits.md): choose a smaller"
    " orchestrator.batch_size or group_size, or let agents fork their sessions less"
)

_STALE_POLICIES: Mapping[str, trainer_pb2.StalePolicy.ValueType] = {
    OnStale.DROP.value: trainer_pb2.STALE_POLICY_DROP,
    OnStale.TRUNCATE.value: trainer_pb2.STALE_POLICY_TRUNCATE,
    OnStale.REQUEUE.value: trainer_pb2.STALE_POLICY_REQUEUE,
}

_TOO_OLD = {"STALE", "RETIRED_EPOCH"}
"""Reasons of the trainer for which a task is drawn again where `on_stale` says so."""

OnStep = Callable[[AppliedStep], Awaitable[None]]


class Training:
    """Feeds one trainer until the last batch is applied.

    Args:
        curriculum: Its state is recorded with each checkpoint.
        pool: Knows the tokenizer and the precision of the replicas.
        space: Says whether the run waits for room on a disk: then no batch is made, since each results in a version on the disk.
        recorder: Writes the text of trajectories that are dropped before they are in a batch.
        changed: Set at every change. A loop checks its condition, clears it and waits.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        scheduler: Scheduler,
        journal: Journal,
        status: RunStatus,
        curriculum: Curriculum,
        *,
        trainer: TrainerLink,
        pool: ReplicaPool,
        space: FreeSpace,
        recorder: Recorder,
        changed: asyncio.Event,
        clock: Clock = CLOCK,
    ) -> None:
        self._config, self._scheduler, self._journal, self._status = config, scheduler, journal, status
        self._curriculum, self._space, self._clock = curriculum, space, clock
        self._trainer, self._pool, self._changed, self._recorder = trainer, pool, changed, recorder
        self._ledger = journal.ledger
        self._at_trainer: set[int] = set()
        self._estimated: set[str] = set()  # ids of batches whose records hold their advantages
        self._submitting = False
        self._step_began: float | None = None  # when the trainer had to begin the step that is due; None: none is due
        self._reporting = False
        self._learned = self._ledger.applied  # the last batch that changed the weights
        self._shown: Mapping[int, int] | None = None  # None once the missing steps were shown

    async def check_trainer(self) -> None:
        """Wait for the trainer, and check that it has the objectives, and that both sides agree on who estimates advantages.

        Raises:
            SluiceError: FAILED_PRECONDITION with the remedy if they do not; otherwise as `TrainerLink.wait_until_there`.
        """
        state = await self._trainer.wait_until_there(self._config.deadlines.start_s)
        for each in self._config.mix:
            try:
                check_sides(each.advantage, state.advantage_estimator)
                check_objective(each.name, each.objective, state.objectives)
            except ValueError as error:
                raise SluiceError.failed_precondition("TRAINER_DOES_NOT_FIT", str(error)) from error

    @property
    def applied(self) -> int:
        """Batches that the trainer has applied."""
        return self._ledger.applied

    async def keep_checkpoint(self, name: str, reason: str) -> None:
        """Let the trainer keep a checkpoint beside the newest ones. It replaces the one that was kept this way before.

        Raises:
            SluiceError: if there is no such checkpoint any more, or the trainer cannot be reached.
        """
        await self._trainer.client.keep_checkpoint(self._trainer.run, name, reason)

    async def save_checkpoint(self, patience_s: float = 0.0) -> trainer_pb2.Checkpoint:
        """Let the trainer write a checkpoint, and release the payloads that the journal no longer needs.

        Args:
            patience_s: Seconds to wait for a trainer that is away.

        Raises:
            SluiceError: if it cannot be written; FAILED_PRECONDITION (NO_EPOCH) if the trainer came back without its epoch.
        """
        self._record(curriculum_noted=self._curriculum.noted())
        answer = await self._trainer.save(
            await self._journal.durable(), self._config.checkpoint.deadline_s, patience_s=patience_s
        )
        saved, version = answer.checkpoint, Version.from_proto(answer.checkpoint.policy_version)
        covered = journal_pb2.CheckpointCovered(
            name=saved.name, policy_version=saved.policy_version, position=saved.journal_position
        )
        self._journal.record_fact(journal_pb2.Fact(checkpoint_covered=covered))
        self._status.checkpoint_written(saved.name, version)
        log.info("checkpoint", name=saved.name, version=str(version))
        return saved

    def stop(self) -> None:
        """End after the batches that are already made."""
        self._scheduler.max_steps = min(self._scheduler.max_steps, self._ledger.next_batch - 1)
        self._changed.set()

    async def run(self, on_step: OnStep, shown: Mapping[int, int]) -> None:
        """Open epochs and train until the last batch is applied; call `on_step` for each, in order.

        Args:
            on_step: Called for each batch that is applied, and for those that an earlier process applied and did not show.
            shown: Last epoch in which each step was shown, of earlier processes.

        Raises:
            SluiceError: if the trainer is lost too often, or refuses.
        """
        lost, self._shown = 0, shown
        while True:
            learned = self._learned
            try:
                epoch = await self._open_epoch(on_step)
                await self._train(epoch, on_step)
            except* EpochLostError as group:
                reason = str(group.exceptions[0])
            else:
                return
            self._scheduler.is_open = False
            # Batches that the trainer trains again after its checkpoint, or skips because they are not finite, do not count as progress.
            lost = lost + 1 if self._learned == learned else 1
            if lost > self._config.max_lost_epochs:
                raise SluiceError.unavailable(
                    "TRAINER_LOST",
                    f"the trainer was lost {lost} times without one new batch in between"
                    f" (orchestrator.max_lost_epochs), at last because: {reason}. See the trainer's log; once it is"
                    " repaired start the run again: it continues",
                )
            log.warning("the trainer lost its epoch; opening another", epoch=self._ledger.epoch, reason=reason)

    # Epochs: agree with the trainer on what its weights hold.

    async def _open_epoch(self, on_step: OnStep) -> int:
        self._at_trainer.clear()
        ledger = self._ledger
        accepted = await self._trainer.last_batch_in(ledger.epoch, ledger.applied)
        if accepted is None:
            await self._begin_epoch()
            accepted = ledger.applied
        # A trainer that did not restart has the batches up to `accepted`, even if the journal cannot read them any more.
        self._at_trainer.update(batch.sequence_no for batch in ledger.to_send if batch.sequence_no <= accepted)
        await self._unmake_unfit()
        await self._journal.durable()
        await self._account_for_past(on_step)
        version = Version(ledger.epoch, ledger.applied)
        log.info("training from", version=str(version), batches_to_send=len(ledger.to_send) - len(self._at_trainer))
        self._submitting, self._step_began = False, None
        self._scheduler.is_open = True
        self._note_load()
        return ledger.epoch

    async def _begin_epoch(self) -> None:
        """Begin an epoch: the trainer restores a checkpoint; the batches after it have to be sent (again)."""
        epoch = self._ledger.allotted + 1
        self._record(epoch_allotted=journal_pb2.EpochAllotted(epoch=epoch))
        await self._journal.durable()
        answer = await self._trainer.begin_epoch(epoch, self._ledger.last_seq, self._ledger.lineage)
        origin = Version.from_proto(answer.restored_version)
        if answer.next_sequence_no != origin.number + 1:
            raise SluiceError.failed_precondition(
                "WRONG_SEQUENCE_NO",
                f"the trainer restored version {origin} but expects batch {answer.next_sequence_no}, not"
                f" {origin.number + 1}: its checkpoint was made by another release; use that one, or begin a new run (--run NAME)",
            )
        try:
            self._ledger.check_reach(origin.number)
        except LedgerError as error:
            raise SluiceError.failed_precondition("NO_CHECKPOINT", str(error)) from error
        self._record(epoch_begun=journal_pb2.EpochBegun(epoch=epoch, origin=answer.restored_version))

    async def _unmake_unfit(self) -> None:
        """Unmake the batches that the trainer lacks and that cannot be sent as they are. Drop groups that the disk damaged."""
        to_send = [batch for batch in self._ledger.to_send if batch.sequence_no not in self._at_trainer]
        for batch in to_send:
            if reason := await self._why_unfit(batch):
                log.warning("a batch is made again", batch=batch.batch_id, reason=reason)
                self._unmake_from(batch, reason)
                break
        for group in list(self._ledger.groups.values()):
            if group.stage is Stage.READY:
                await self._readable(group)

    def _unmake_from(self, batch: Batch, reason: str) -> None:
        """Unmake a batch that the trainer lacks, and all later batches: the order of batches has no gaps."""
        later = [each for each in self._ledger.to_send if each.sequence_no >= batch.sequence_no]
        for each in reversed(later):
            self._estimated.discard(each.batch_id)
            self._record(batch_unmade=journal_pb2.BatchUnmade(sequence_no=each.sequence_no, reason=reason))

    async def _why_unfit(self, batch: Batch) -> str:
        """Return why a batch cannot be sent as it was made; empty if it can."""
        if not self._scheduler.is_fresh(batch):
            return "its tokens are too old by now"
        try:
            found = [(group, await self._journal.trajectories(group)) for group in batch.groups]
        except GroupDamagedError as error:
            return str(error)
        if await asyncio.to_thread(too_large, found):
            return _BATCH_TOO_LARGE
        try:
            records = await self._with_advantages(found)
        except UnfitRewardsError as error:
            return str(error)
        if batch.digests and batch.digests != tuple(await asyncio.to_thread(_digests, records)):
            return "its trajectories are not the same bytes as when it was made: orchestrator.advantage was changed"
        self._estimated.add(batch.batch_id)
        return ""

    async def _readable(self, group: Group) -> list[SharedRecord] | None:
        """Return the trajectories of a group in no batch; drop it and draw its task again if the disk damaged them.

        Raises:
            JournalError: if the journal as a whole cannot be read now; no group is dropped for that.
        """
        try:
            return await self._journal.trajectories(group)
        except GroupDamagedError as error:
            log.warning("a damaged group is dropped; its task is drawn again", group=group.name, error=str(error))
            self._drop(group, Reason.JOURNAL_DAMAGED, redraw=True)
            return None

    async def _account_for_past(self, on_step: OnStep) -> None:
        """Record the outcome of batches that the weights hold but whose outcome no process could record."""
        await self._show_missing(on_step)
        batches = self._ledger.unreported
        if not batches:
            return
        steps = await self._trainer.past_steps(batches[0].sequence_no, batches[-1].sequence_no)
        for batch in batches:
            step = steps.get(batch.sequence_no)
            if step is not None:
                await self._note_applied(batch, step, on_step, past=True)
                continue
            log.warning("the trainer no longer knows the outcome of a batch that it applied", batch=batch.batch_id)
            lost = journal_pb2.DroppedTrajectories(trajectory_ids=batch.trajectory_ids)
            version = Version(self._ledger.epoch, batch.sequence_no).to_proto()
            applied = journal_pb2.BatchApplied(
                sequence_no=batch.sequence_no,
                policy_version=version,
                dropped={Reason.REPORT_LOST: lost},
                elapsed_s=self._status.elapsed_s,
            )
            self._record(batch_applied=applied)
            await self._show(batch, report_of(applied), applied, await self._readable_groups(batch), on_step, past=True)

    async def _show_missing(self, on_step: OnStep) -> None:
        """Show the applied batches that an earlier process recorded, but did not show before it was killed."""
        # A batch that a checkpoint covers was shown long before.
        batches, shown = dict(self._ledger.applied_batches), self._shown
        if shown is None:
            return
        facts = await asyncio.to_thread(self._applied_facts, batches.keys()) if batches else {}
        missing = [number for number, fact in facts.items() if shown.get(number, 0) < fact.policy_version.epoch]
        steps = await self._trainer.past_steps(missing[0], missing[-1]) if missing else {}
        self._shown = None
        for number in missing:
            batch, applied, step = batches[number], facts[number], steps.get(number)
            if step is None or step.policy_version != applied.policy_version:
                step = report_of(applied)
            found = await self._readable_groups(batch)
            await self._show(batch, step, applied, found, on_step, past=True)

    def _applied_facts(self, numbers: Collection[int]) -> Mapping[int, journal_pb2.BatchApplied]:
        """Return the last fact of each of these applied batches, by number, ascending."""
        facts = (fact.batch_applied for fact in self._journal.recorded("batch_applied"))
        found = {fact.sequence_no: fact for fact in facts if fact.sequence_no in numbers}
        return dict(sorted(found.items()))

    # Out: batches.

    async def _train(self, epoch: int, on_step: OnStep) -> None:
        """Submit batches and follow the trainer's reports side by side until the last batch is applied."""
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(self._submit(epoch)), tasks.create_task(self._follow(epoch, on_step))]
            while not self._done:
                left_s = self._step_left_s()
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with self._clock.timeout(left_s):
                        await self._changed.wait()
            for each in work:
                each.cancel()

    def _step_left_s(self) -> float | None:
        """Return the seconds that the trainer has left for the step that is due; None if none is due.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if no time is left.
        """
        if self._step_began is None or self._reporting:  # a slow report is not the trainer's fault
            return None
        if self._trainer.away:  # being away has its own deadline
            return RETRY_S
        limit = self._config.deadlines.step_s
        left = self._step_began + limit - self._trainer_time()
        if left <= 0:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "STEP_HANGS",
                f"the trainer has reported no step for {limit:g} s (orchestrator.deadlines.step_s) although batch"
                f" {self._ledger.applied + 1} is due: look for the reason in its log, restart it, or raise the deadline if its"
                " steps take that long; then start the run again: it continues",
            )
        return left

    def _trainer_time(self) -> float:
        """Return a clock in seconds that stands still while the trainer is away."""
        return self._clock() - self._trainer.away_s

    def _note_load(self) -> None:
        """Note whether the trainer has work."""
        self._status.trainer_idle.set(not self._at_trainer, self._clock())
        if not (self._at_trainer or self._submitting):
            self._step_began = None
        elif self._step_began is None:
            self._step_began = self._trainer_time()
        self._changed.set()

    @property
    def _done(self) -> bool:
        # The last batch is done only when it is reported, because `_train` cancels the report once the run is done.
        return self._ledger.applied >= self._scheduler.max_steps and not self._reporting

    async def _submit(self, epoch: int) -> None:
        try:
            while True:
                batch = next((each for each in self._ledger.to_send if each.sequence_no not in self._at_trainer), None)
                if batch is None:
                    batch = await self._make_batch()
                found = [(group, await self._journal.trajectories(group)) for group in batch.groups]
                try:
                    await self._send(batch, epoch, [record for _, records in found for record in records])
                except BatchRefusedError as refusal:
                    self._submitting = False
                    self._unmake_from(batch, str(refusal))
                    self._set_aside(refused(found, refusal), found)
                    self._note_load()
        except EpochLostError:
            # The error raised here cancels `_follow`, which would cut off the report of a step in progress.
            while self._reporting:
                self._changed.clear()
                await self._changed.wait()
            raise

    async def _make_batch(self) -> Batch:
        """Make the next batch as soon as the trainer and the disks have room for it and its groups are complete."""
        while True:
            if len(self._at_trainer) < _MOST_AT_TRAINER and not self._space.short:
                await self._drop_stale()
                groups = self._scheduler.choose_batch()
                if groups is not None and (made := await self._made_of(groups)) is not None:
                    return made
                if groups is not None:
                    continue  # choose again
            self._changed.clear()
            await self._changed.wait()

    async def _made_of(self, groups: Sequence[Group]) -> Batch | None:
        """Make the next batch of these groups; None if one was dropped or set aside, or they may not be trained together any more."""
        found = [(group, await self._readable(group)) for group in groups]
        readable = [(group, each) for group, each in found if each is not None]
        if len(readable) < len(found):
            return None
        if left_out := await asyncio.to_thread(too_large, readable):
            facts = [set_aside(each, Reason.BATCH_TOO_LARGE, _BATCH_TOO_LARGE) for each in left_out]
            self._set_aside(facts, readable)
            return None
        try:
            records = await self._with_advantages(readable)
        except UnfitRewardsError as error:
            unfit = [group for group in groups if group.name in error.groups]
            self._set_aside([set_aside(each, Reason.REWARDS_UNFIT, str(error)) for each in unfit], readable)
            return None
        digests = await asyncio.to_thread(_digests, records)
        if not self._scheduler.may_batch(groups):
            return None  # the limits of the run were changed meanwhile
        number = self._ledger.next_batch
        learning_rate = self._ledger.settings.get(LEARNING_RATE)
        self._record(
            batch_made=journal_pb2.BatchMade(
                sequence_no=number,
                batch_id=f"batch-{number}-{self._ledger.batches_made + 1}",
                groups=[each.number for each in groups],
                trajectory_ids=[each.trajectory.trajectory_id for each in records],
                trajectory_digests=digests,
                content_digest=batch_digest(digests),
                max_staleness=self._scheduler.bound.max_staleness,
                learning_rate=None if learning_rate is None else float(learning_rate),
            )
        )
        made = self._ledger.batches[number]
        self._estimated.add(made.batch_id)
        return made

    async def _with_advantages(self, groups: Sequence[tuple[Group, list[SharedRecord]]]) -> list[SharedRecord]:
        """Return the trajectories of a batch, with the advantages that their environments estimate."""
        for name in {group.environment: None for group, _ in groups}:
            own = [record for group, records in groups if group.environment == name for record in records]
            await _give_advantages(self._estimator(name), own)
        return [record for _, records in groups for record in records]

    def _estimator(self, environment: str) -> str:
        """Return the estimator of an environment. If it was renamed meanwhile, return the run's estimator."""
        settings = self._curriculum.environments.get(environment, self._config)
        return settings.advantage

    async def _drop_stale(self) -> None:
        """Drop the groups that no batch may train any more."""
        if not (groups := self._scheduler.stale_groups()):
            return
        texts = {group.number: await self._texts(group) for group in groups}
        groups = self._scheduler.stale_groups()  # limits may have been changed meanwhile
        for group in groups:
            self._recorder.write_dropped([Dropped(each, Reason.STALE) for each in texts.get(group.number, ())])
        versions = sorted({version for group in groups for version in group.versions})
        log.warning("groups are too old to be trained", groups=len(groups), versions=[str(each) for each in versions])
        for group in groups:
            self._drop(group, Reason.STALE, redraw=self._scheduler.on_stale is OnStale.REQUEUE)
        self._changed.set()

    async def _texts(self, group: Group) -> Sequence[SharedRecord]:
        """Return the trajectories of a group for people to read; none if the disk damaged them."""
        try:
            return await self._journal.trajectories(group)
        except GroupDamagedError as error:
            log.warning("a dropped group cannot be shown", group=group.name, error=str(error))
            return []

    async def note_left(self) -> None:
        """Write the text of the trajectories that are in no batch at the end of the run. If the run is continued, it may train them."""
        for group in list(self._ledger.groups.values()):
            if group.stage is not Stage.RUNNING:
                self._recorder.write_dropped([Dropped(each, Reason.RUN_ENDED) for each in await self._texts(group)])

    def _set_aside(self, facts: Sequence[journal_pb2.Fact], found: Sequence[Found]) -> None:
        """Record which trajectories are set aside, and write their text. The run continues without them."""
        records = {each.trajectory.trajectory_id: each for _, own in found for each in own}
        for fact in facts:
            self._journal.record_fact(fact)
            said = fact.trajectories_set_aside
            lost = [records[each] for each in said.trajectory_ids if each in records]
            self._recorder.write_dropped([Dropped(each, said.reason) for each in lost])
            log.error(
                "trajectories are set aside: they can never be trained",
                group=f"g{said.group}",
                trajectories=len(said.trajectory_ids),
                reason=said.reason,
                problem=said.problem,
            )
        self._changed.set()

    def _drop(self, group: Group, reason: str, *, redraw: bool) -> None:
        """Drop an accepted group that is in no batch."""
        self._record(
            group_dropped=journal_pb2.GroupDropped(
                group=group.number, reason=reason, trajectories=group.size, redraw=redraw and not group.redrawn
            )
        )

    def _record(self, **kind: Any) -> None:  # noqa: ANN401 - one of the kinds of a fact
        self._journal.record_fact(journal_pb2.Fact(**kind))

    async def _send(self, batch: Batch, epoch: int, records: Sequence[SharedRecord]) -> None:
        while len(self._at_trainer) >= _MOST_AT_TRAINER:
            self._changed.clear()
            await self._changed.wait()
        try:
            async with self._clock.timeout(self._config.deadlines.lost_s):
                while not (digest := self._pool.tokenizer_digest()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise self._pool.none_for(self._config.deadlines.lost_s, "orchestrator.deadlines.lost_s") from error
        header = trainer_pb2.BatchHeader(
            run=f"runs/{self._trainer.run}",
            batch_id=batch.batch_id,
            sequence_no=batch.sequence_no,
            target_version=Version(epoch, batch.sequence_no).to_proto(),
            max_staleness=self._scheduler.bound_of(batch),
            learning_rate=batch.learning_rate,
            on_stale=_STALE_POLICIES[self._config.on_stale],
            trajectory_count=len(records),
            tokenizer_digest=digest,
            sampler_dtype=self._pool.sampler_dtype(),
        )
        # If a group loses a stale trajectory, the trainer estimates its advantages again in the same way.
        together: dict[str, list[str]] = {}
        for group in batch.groups:
            together.setdefault(group.environment, []).append(group.name)
        if len(self._config.mix) > 1 and {self._estimator(name) for name in together} <= set(ESTIMATORS):
            for name, names in together.items():
                header.estimated_groups.add(advantage_estimator=self._estimator(name), group_ids=names)
        elif (estimator := self._config.mix[0].advantage) != NO_ADVANTAGE:
            header.advantage_estimator = estimator
        # Send the trainer only what the journal can send again.
        await self._journal.durable()
        self._submitting = True
        self._note_load()
        await self._trainer.submit_batch(header, Each(records, SharedRecord.whole_trajectory))
        self._submitting = False
        self._record(batch_sent=journal_pb2.BatchSent(sequence_no=batch.sequence_no, epoch=epoch))
        # The report may have come before the answer.
        if batch.sequence_no > self._ledger.applied:
            self._at_trainer.add(batch.sequence_no)
        self._note_load()

    # Back: reports.

    async def _follow(self, epoch: int, on_step: OnStep) -> None:
        async for step in self._trainer.steps(epoch, self._ledger.applied + 1):
            await self._take_in(step, on_step)
            if self._done:
                return

    async def _take_in(self, step: trainer_pb2.StepReport, on_step: OnStep) -> None:
        """Note an applied batch, which ends its groups, and report it."""
        batch = self._ledger.batches.get(step.sequence_no)
        if batch is None:
            raise EpochLostError(f"the trainer applied batch {step.sequence_no}, which this run has not made")
        if batch.content_digest and step.content_digest not in ("", batch.content_digest):
            log.error("the trainer got other bytes than were made", batch=batch.batch_id, digest=step.content_digest)
        self._reporting = True
        try:
            await self._note_applied(batch, step, on_step)
        finally:
            self._reporting = False
            self._step_began = None
            self._note_load()

    async def _note_applied(
        self, batch: Batch, step: trainer_pb2.StepReport, on_step: OnStep, *, past: bool = False
    ) -> None:
        found = await self._readable_groups(batch)
        applied = applied_fact(batch, step)
        applied.elapsed_s = self._status.elapsed_s
        if self._scheduler.on_stale is OnStale.REQUEUE:
            dropped = [each.trajectory_ids for reason, each in applied.dropped.items() if reason in _TOO_OLD]
            late = set(chain.from_iterable(dropped))
            applied.redrawn.extend(
                group.number
                for group in batch.groups
                if not group.redrawn and any(each.trajectory_id in late for each in group.trajectories)
            )
        self._record(batch_applied=applied)
        if not step.skipped:
            self._learned = max(self._learned, step.sequence_no)
        self._at_trainer.discard(step.sequence_no)
        self._note_load()
        # Metrics are computed after the batch has made room for others. If a kill comes before that, `_show_missing` catches up.
        await run_to_end(asyncio.create_task(self._show(batch, step, applied, found, on_step, past=past), name="show"))

    async def _show(
        self,
        batch: Batch,
        step: trainer_pb2.StepReport,
        applied: journal_pb2.BatchApplied,
        found: Sequence[tuple[Group, list[SharedRecord]]],
        on_step: OnStep,
        *,
        past: bool,
    ) -> None:
        """Summarise an applied batch."""
        records = [record for _, each in found for record in each]
        if batch.batch_id in self._estimated:
            self._estimated.remove(batch.batch_id)
        else:  # UnfitRewardsError: the settings now name another estimator; the batch is trained
            with contextlib.suppress(UnfitRewardsError):
                records = await self._with_advantages(found)
        for group, own in found:
            for each in own:  # an earlier release did not record it
                each.own.environment = group.environment
        bound = self._scheduler.bound_of(batch)
        summary = await summarise(
            step, applied, records, self._ledger.lineage, bound, is_solved=self._curriculum.is_solved, past=past
        )
        if len(self._config.mix) > 1:
            environments = {group.name: group.environment for group in batch.groups}
            summary = replace(summary, metrics={**summary.metrics, **reward_by_environment(records, environments)})
        await on_step(summary)

    async def _readable_groups(self, batch: Batch) -> list[tuple[Group, list[SharedRecord]]]:
        """Return the trajectories of a batch, without those that are damaged in the journal. The trainer has all of them.

        Raises:
            JournalError: if the journal as a whole cannot be read now.
        """
        found = []
        for group in batch.groups:
            try:
                found.append((group, await self._journal.trajectories(group)))
            except GroupDamagedError as error:
                log.warning("a trained group cannot be shown", group=group.name, error=str(error))
        return found


def _digests(records: Sequence[SharedRecord]) -> list[bytes]:
    """Return the digest of each trajectory, as the trainer gets it. Its time grows with their total size: not for an event loop."""
    return [trajectory_digest(each) for each in Each(records, SharedRecord.whole_trajectory)]


async def _give_advantages(estimator: str, records: Sequence[SharedRecord]) -> None:
    """Set the advantage of each trajectory within its group, one reward per episode. Set none if the trainer estimates.

    If branches have rewards of their own, each token has its own advantage; see `sluice.advantages.Advantage`.

    Raises:
        UnfitRewardsError: if the estimator cannot take the rewards of some groups.
    """
    if estimator == NO_ADVANTAGE or estimator in TRAINER_ESTIMATORS:
        for record in records:
            del record.trajectory.advantages[:]
        return
    turn = Turn()
    episodes = []
    for record in records:
        await turn.give_way()
        trajectory = record.trajectory
        reward = trajectory.reward if trajectory.HasField("reward") else None
        episodes.append(Episode(trajectory.episode_id, trajectory.group_id, reward, sampled_tokens(trajectory)))
    branched = any(record.trajectory.branch_rewards for record in records)
    advantages = advantages_by_episode(estimator, episodes, branched=branched)
    for record in records:
        await turn.give_way()
        trajectory = record.trajectory
        advantage = advantages.get(trajectory.episode_id)
        if advantage is None:
            trajectory.advantages[:] = []
        elif not trajectory.branch_rewards:
            trajectory.advantages[:] = [advantage.value]
        else:
            by_turn = advantage.at(np.array(trajectory.branch_rewards) - trajectory.reward)
            if not (np.abs(by_turn) <= FLOAT32_MAX).all():
                raise UnfitRewardsError(
                    f"{estimator} makes advantages beyond float32 of the rewards of branches: bound them"
                    " (orchestrator.max_reward), or scale them down",
                    {trajectory.group_id},
                )
            trajectory.advantages[:] = np.repeat(by_turn, trajectory.turn_runs)
