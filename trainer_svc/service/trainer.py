"""The life of a trainer: load the model, begin an epoch, train its batches, report each step, and save checkpoints between batches."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from time import perf_counter

import grpc
import structlog
from prometheus_client import Metric

from sluice.rpc import SluiceError
from sluice.rpc.drain import Drain
from sluice.tasks import discard_outcome
from sluice.telemetry import counter, gauge
from sluice.v1 import checkpoint_pb2, trainer_pb2
from sluice.v1.trainer_pb2 import Checkpoint, StepReport
from sluice.versions import BASE, Version
from trainer_svc.checkpoint.batch_record import KEPT_REPORTS
from trainer_svc.service.admission import QUEUE_BATCHES, Admission, Ticket
from trainer_svc.service.batches import Batch
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.learner import Applied, Learner, Restored
from trainer_svc.service.metrics import SKIPPED_STEPS, STEP_SECONDS, WAITED_SECONDS, observe_checkpoint, observe_step
from trainer_svc.service.rank_group import OUT_OF_STEP
from weightsync.publisher import AdapterUpdate, PolicyPublisher, PushReport, Update

_OF_A_STEP = (trainer_pb2.TRAINER_PHASE_TRAINING, trainer_pb2.TRAINER_PHASE_SAVING)
"""Phases that a drain waits for. It does not wait for a publication, which is repeated after a restart, unless a checkpoint is due:
that begins only after the publication of its step."""

log = structlog.get_logger(__name__)


class Trainer:
    """One policy and the epoch that trains it. It runs on one event loop; blocking work runs in the compute thread.

    Args:
        learner: The policy.
        publisher: Pushes the policy's versions to weight sync.
        compute: The thread that runs the learner; None: a new one.
        drain: Tells whether the service is draining. Then no further batch is trained.
    """

    def __init__(
        self,
        learner: Learner,
        publisher: PolicyPublisher,
        compute: ComputeThread | None = None,
        drain: Drain | None = None,
    ) -> None:
        self._drain = drain or Drain()
        self.learner = learner
        self.common, self.config = learner.common, learner.config
        self.admission: Admission[Batch] | None = None
        """The order and the queue of batches; None until the model is loaded."""
        self.steps: StepLog | None = None
        """The reports of the present epoch; None before the first epoch."""
        self._compute = compute or ComputeThread()
        self.checkpoints = CheckpointWriter(learner, self._compute)
        self._publisher = publisher
        self.published: Version | None = None
        """Newest version that weight sync has committed in this epoch."""
        self._last_push: PushReport | None = None
        self._arrived = asyncio.Event()
        self._checkpoint_is_due = False
        self._doing: trainer_pb2.TrainerPhase.ValueType = trainer_pb2.TRAINER_PHASE_WAITING
        self._training: asyncio.Task[None] | None = None
        self._opening: tuple[int, asyncio.Task[Restored]] | None = None
        self._failure: SluiceError | None = None

    async def load(self) -> None:
        """Load the base model.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if it takes too long.
        """
        await self._compute.run(self.learner.load, deadline_s=self.config.deadlines.load_s, what="loading the model")
        self.admission = Admission(QUEUE_BATCHES, self.learner.tokenizer_digest)
        log.info("model loaded", model=self.common.model, tokenizer_digest=self.learner.tokenizer_digest)

    @property
    def phase(self) -> trainer_pb2.TrainerPhase.ValueType:
        """What the trainer is doing."""
        if self.admission is None:
            return trainer_pb2.TRAINER_PHASE_STARTING
        if self._failure is not None:
            return trainer_pb2.TRAINER_PHASE_FAILED
        if self._training is None:
            return trainer_pb2.TRAINER_PHASE_READY
        idle = self._doing == trainer_pb2.TRAINER_PHASE_WAITING
        return trainer_pb2.TRAINER_PHASE_SAVING if idle and self.checkpoints.active else self._doing

    @property
    def left(self) -> dict[str, int]:
        """Number of steps and of checkpoints in progress that a drain waits for."""
        trains = self._training is not None and not self._training.done()
        trains = trains and (self._doing in _OF_A_STEP or self._checkpoint_is_due)
        return {"steps": int(trains), "checkpoints": int(self.checkpoints.active)}

    @property
    def last_error(self) -> str:
        """Why the epoch ended, or why the last checkpoint was not written; empty if neither happened."""
        return str(self._failure) if self._failure is not None else self.checkpoints.last_error

    def waits_for(self) -> Iterator[str]:
        """Yield what an orchestrator has to do before the trainer trains."""
        if self._failure is not None:
            yield f"an orchestrator that begins a newer epoch, since training stopped: {self._failure.reason}"
        elif self._training is None:
            yield "an orchestrator that begins an epoch"

    def scrape(self) -> Iterator[Metric]:
        """Yield the trainer's state as Prometheus metrics."""
        phases = trainer_pb2.TrainerPhase
        named = {
            name.removeprefix("TRAINER_PHASE_").lower(): float(phases.Value(name) == self.phase)
            for name in phases.keys()[1:]
        }
        yield gauge("sluice_trainer_phase", "1 for what the trainer is doing, 0 for the rest.", named, "phase")
        if self.admission is None:
            return
        version, published = self.admission.version or self.learner.version, self.published or BASE
        for name, text, value in (
            ("policy_epoch", "Epoch of the version of the weights.", version.epoch),
            ("policy_number", "Number of the version of the weights: batches absorbed.", version.number),
            (
                "published_number",
                "Number of the newest version that weight sync has committed in this epoch.",
                published.number,
            ),
            ("queued_batches", "Batches accepted that are not applied.", self.admission.queued),
            ("max_queued_batches", "Most batches that may wait.", QUEUE_BATCHES),
        ):
            yield gauge(f"sluice_trainer_{name}", text, float(value))
        steps = float(self.learner.optimizer_steps)
        yield counter("sluice_trainer_optimizer_steps", "Optimizer steps of the weights.", steps)

    def accepting(self) -> Admission[Batch]:
        """Return the queue of batches.

        Raises:
            SluiceError: UNAVAILABLE while the model loads, FAILED_PRECONDITION after a failure.
        """
        if self._failure is not None:
            raise _failed(self._failure)
        return self._loaded()

    def _loaded(self) -> Admission[Batch]:
        if self.admission is None:
            raise SluiceError.unavailable("STARTING", "the trainer is loading its model: retry", retry_after_s=1.0)
        return self.admission

    def admit(self, ticket: Ticket, batch: Batch) -> bool:
        """Queue a batch and wake the training loop. Return whether the batch was accepted before.

        Raises:
            RefusedError: if it may not enter.
            SluiceError: as `accepting`.
        """
        duplicate = self.accepting().admit(ticket, batch)
        self._arrived.set()
        return duplicate

    # Epochs.

    async def begin_epoch(self, epoch: int, checkpoint: str) -> Restored:
        """Restore a checkpoint, publish it as the epoch's first version, and accept batches.

        Args:
            epoch: A number above every epoch of the run, or the present epoch: then the answer is repeated.
            checkpoint: Name of the checkpoint; empty for the newest one, or the base model.

        Raises:
            SluiceError: as documented for the RPC BeginEpoch.
        """
        self._loaded()
        if (ranks := self.learner.ranks) is not None and ranks.broken is not None:
            raise ranks.broken
        present, opening = self._opening or (0, None)
        failed = opening is not None and opening.done() and (opening.cancelled() or opening.exception() is not None)
        if opening is None or epoch != present or failed:
            if opening is not None and not opening.done():
                raise SluiceError.aborted("EPOCH_OPENING", f"epoch {present} is being opened: wait for it, then retry")
            self._check_newer(epoch, present)
            opening = asyncio.create_task(self._open(epoch, checkpoint))
            discard_outcome(opening)
            self._opening = (epoch, opening)
        # If the caller is cancelled, the opening continues. A repeated call for the same epoch waits for it.
        restored = await asyncio.shield(opening)
        if self._failure is not None and epoch == self.learner.version.epoch:
            raise _failed(self._failure)
        return restored

    def _check_newer(self, epoch: int, present: int) -> None:
        newest = self.learner.checkpoints.lineage.newest_epoch
        if epoch <= newest and epoch != present:
            raise SluiceError.failed_precondition(
                "OLD_EPOCH",
                f"epoch {epoch} is not newer than epoch {newest} of run {self.common.run}: begin a greater one, or use a new run name",
            )
        if epoch < 1:
            raise SluiceError.invalid_argument("epoch", "epochs count from 1; 0 is the base model")

    async def _open(self, epoch: int, checkpoint: str) -> Restored:
        await self._close()
        deadlines = self.config.deadlines
        await self.checkpoints.settled(deadlines.save_s)  # the one being written may be the one to restore
        restored = await self._compute.run(
            partial(self.learner.restore, epoch, checkpoint),
            deadline_s=deadlines.step_s + deadlines.load_s,  # a step of the previous epoch may still be running
            what="restoring the checkpoint",
        )
        update = await self._compute.run(
            partial(self.learner.encode, self._publisher, deadlines.push_s),
            deadline_s=deadlines.push_s + deadlines.load_s,
            what="copying the weights",
        )
        self.published = self._last_push = None
        try:
            await self._publish(update)
        except SluiceError as error:
            self._check_ranks(error)
            if error.code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                raise SluiceError.unavailable("WEIGHTSYNC_UNAVAILABLE", error.message, retry_after_s=1.0) from error
            raise
        admission = self.accepting()
        self.steps = StepLog(restored.version.number, map(_recorded, restored.held))
        admission.open(restored.version, restored.known)
        # An empty context: the epoch outlives the request that began it, and the request's id must not appear in its logs and calls.
        self._training = asyncio.create_task(self._run(admission, self.steps), context=contextvars.Context())
        self._training.add_done_callback(self._ended)
        log.info("epoch began", version=str(restored.version), origin=str(restored.origin))
        return restored

    def _ended(self, training: asyncio.Task[None]) -> None:
        """Report a failure to everyone who watches steps, asks for the state or submits a batch."""
        if training.cancelled() or training is not self._training:
            return
        error = training.exception()
        if error is None:
            return
        if isinstance(error, SluiceError):
            self._failure = error
        else:
            reason = f"{type(error).__name__}: {error}"
            self._failure = SluiceError(grpc.StatusCode.INTERNAL, "STEP_FAILED", f"a training step failed: {reason}")
        with contextlib.suppress(SluiceError):
            self._check_ranks(self._failure)
        log.error("training failed", error=str(self._failure), exc_info=error)
        self._end_epoch(_failed(self._failure))

    async def _close(self) -> None:
        """End the present epoch. The orchestrator sends the queued batches again in the next epoch."""
        training, self._training = self._training, None
        self.learner.abandon()
        if training is not None:
            training.cancel()
            await asyncio.wait({training})
        self._end_epoch(
            SluiceError.aborted(
                "EPOCH_CHANGED", "another epoch begins: call WatchSteps again when BeginEpoch has returned"
            )
        )
        self._failure = None

    def _end_epoch(self, reason: SluiceError) -> None:
        """Stop training and accepting batches, and tell the watchers of steps why."""
        self.learner.abandon()
        if self.admission is not None:
            self.admission.close()
        if self.steps is not None:
            self.steps.end(reason)

    def _check_ranks(self, error: SluiceError) -> None:
        """Give up the rank group after an error that leaves its ranks at different commands.

        Raises:
            SluiceError: UNAVAILABLE if there are several ranks, which have to start again.
        """
        ranks = self.learner.ranks
        if ranks is not None and error.reason in OUT_OF_STEP:
            raise ranks.give_up(error) from error

    async def save(self, journal_position: int) -> Checkpoint:
        """Write a checkpoint between two batches.

        Raises:
            SluiceError: FAILED_PRECONDITION without an epoch, UNAVAILABLE if the ranks are out of step, otherwise as in
                `CheckpointWriter.save`.
        """
        if self.accepting().version is None:
            raise SluiceError.failed_precondition("NO_EPOCH", "no epoch is open: call BeginEpoch first")
        try:
            return await self.checkpoints.save(journal_position)
        except SluiceError as error:
            self._check_ranks(error)
            raise

    async def stop(self, grace_s: float) -> bool:
        """End the epoch. Abandon a running step; give other work of the compute thread and a checkpoint `grace_s` seconds to end.

        Returns:
            Whether the threads ended. If not, the interpreter must not be finalised, because they still run.
        """
        if self._opening is not None and not self._opening[1].done():
            self._opening[1].cancel()
            await asyncio.wait({self._opening[1]})
        await self._close()
        saved, computed = await asyncio.gather(self.checkpoints.ended(grace_s), self._compute.stop(grace_s))
        return saved and computed

    # The training loop.

    async def _run(self, admission: Admission[Batch], steps: StepLog) -> None:
        """Train and publish until cancelled.

        Raises:
            SluiceError: the error that ended the epoch: a version could not be published, a step took too long, or too many
                batches in a row had a step that was not finite.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._train(admission, steps, tasks))  # a task, so that errors keep their order
        except ExceptionGroup as group:
            error: Exception = group
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]  # the first error caused the others
            raise error from group

    async def _train(self, admission: Admission[Batch], steps: StepLog, pushes: asyncio.TaskGroup) -> None:
        """Apply batches in order. Report each step, publish its version, and save a checkpoint if one is due.

        The next batch is trained while a version is pushed. The weights of the next version are encoded after that push has ended.
        """
        push_wait_s, skipping, pushing = 0.0, 0, None
        while True:
            waiting = perf_counter()
            self._doing = trainer_pb2.TRAINER_PHASE_WAITING
            while self._drain.begun.is_set() or (batch := admission.take()) is None:
                self._arrived.clear()
                await self._arrived.wait()
            waited_s = perf_counter() - waiting
            WAITED_SECONDS.inc(waited_s)
            self._doing = trainer_pb2.TRAINER_PHASE_TRAINING
            with STEP_SECONDS.time():
                applied = await self._compute.run(
                    partial(self.learner.apply, batch), deadline_s=self.config.deadlines.step_s, what="a training step"
                )
            SKIPPED_STEPS.inc(applied.skipped_steps)
            version = admission.finish()
            every = self.config.checkpoint.every_steps
            self._checkpoint_is_due = bool(every) and version.number % every == 0
            report = _step_report(batch, applied, waited_s, push_wait_s, self._last_push)
            steps.append(report)
            skipping = self._check_finite(applied, skipping)
            self._doing = trainer_pb2.TRAINER_PHASE_PUBLISHING
            waiting = perf_counter()
            if pushing is not None:
                await asyncio.wait({pushing})  # a failed push ends the group; the push's deadline bounds the wait
            push_wait_s = perf_counter() - waiting
            comparing = perf_counter()
            update = await self._compute.run(
                partial(self.learner.encode, self._publisher, self.config.deadlines.push_s),
                deadline_s=self.config.deadlines.step_s,
                what="comparing the weights with the version before",
            )
            compare_s = perf_counter() - comparing
            observe_step(applied.metrics, {"wait_batch": waited_s, "wait_push": push_wait_s, "compare": compare_s})
            pushing = pushes.create_task(self._publish(update))
            if self._checkpoint_is_due:
                self._doing = trainer_pb2.TRAINER_PHASE_SAVING
                await self.checkpoints.begin_scheduled()
                self._checkpoint_is_due = False

    async def _publish(self, update: Update | AdapterUpdate) -> None:
        """Push a version after the previous push has ended: the publisher has room for one version.

        Raises:
            SluiceError: the last error of the push.
        """
        deadline_s = self.config.deadlines.push_s
        try:
            self._last_push = await self._publisher.publish(update, deadline_s=deadline_s)
        except SluiceError as error:
            raise SluiceError(
                error.code,
                error.reason,
                f"version {update.version} could not be published within {deadline_s:g} s: {error.message}"
                " (is weightsync up at peers.weightsync?)",
                retry_after_s=error.retry_after_s,
            ) from error
        self.published = update.version

    def _check_finite(self, applied: Applied, skipping: int) -> int:
        """Return how many batches in a row had a skipped step.

        Raises:
            SluiceError: FAILED_PRECONDITION if there are too many.
        """
        if not applied.skipped_steps:
            return 0
        skipping += 1
        if skipping >= self.config.max_skipped_steps:
            raise SluiceError.failed_precondition(
                "NON_FINITE_STEPS",
                f"{skipping} batches in a row had an optimizer step whose loss or gradient is not finite"
                " (trainer.max_skipped_steps): lower trainer.lr (trainer.critic.lr if the critic's steps were skipped), look"
                " at rewards and log-probabilities, go back to a checkpoint",
            )
        log.warning(
            "optimizer steps skipped: loss or gradient not finite",
            skipped_steps=applied.skipped_steps,
            batches_in_a_row=skipping,
        )
        return skipping


def _failed(cause: SluiceError) -> SluiceError:
    return SluiceError.failed_precondition("TRAINER_FAILED", f"training stopped: {cause.message}; begin a newer epoch")


# Checkpoints.


class CheckpointWriter:
    """Write one checkpoint at a time; the next begins when it is done.

    The compute thread copies the state between two batches. The files are written in the background.
    """

    def __init__(self, learner: Learner, compute: ComputeThread) -> None:
        self._learner, self._compute = learner, compute
        self._deadlines = learner.config.deadlines
        self._beginning = asyncio.Lock()
        self._writing: asyncio.Task[Checkpoint] | None = None
        self.last_error = ""
        """Why the last checkpoint was not written; empty if it was."""

    @property
    def active(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    async def save(self, journal_position: int) -> Checkpoint:
        """Write a checkpoint of the present version, and return when it is on disk.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED if the disk is full, DEADLINE_EXCEEDED if it takes too long.
        """
        writing = await self._begin(journal_position)
        await self._wait(writing, self._deadlines.save_s)
        return writing.result()

    async def begin_scheduled(self) -> None:
        """Begin a scheduled checkpoint and return when the state is copied. Note a failure in `last_error`.

        Raises:
            SluiceError: if a failure leaves ranks out of step: a rank is lost, or its progress is unknown.
        """
        try:
            await self._begin(journal_position=0)
        except SluiceError as error:
            self._note(error)
            if self._learner.ranks is not None and error.reason in OUT_OF_STEP:
                raise

    async def settled(self, timeout_s: float) -> None:
        """Return when no checkpoint is being written, whatever the outcome.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if it takes longer.
        """
        if self._writing is not None:
            await self._wait(self._writing, timeout_s)

    async def ended(self, grace_s: float) -> bool:
        """Wait for a checkpoint that is being written. Return whether it ended in time."""
        try:
            await self.settled(grace_s)
        except SluiceError:
            log.warning("the checkpoint in progress did not finish in time; abandoning it", grace_s=grace_s)
            return False
        return True

    async def _wait(self, writing: asyncio.Task[Checkpoint], timeout_s: float) -> None:
        """Wait for a checkpoint. If the caller is cancelled, the writing continues."""
        await asyncio.wait({writing}, timeout=timeout_s)
        if not writing.done():
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "CHECKPOINT_DEADLINE",
                f"a checkpoint is still being written after {timeout_s:g} s: is the disk below"
                f" {self._learner.checkpoints.directory} hanging? Raise trainer.deadlines.save_s if it is only slow",
            )

    async def _begin(self, journal_position: int) -> asyncio.Task[Checkpoint]:
        """Copy the state after the previous checkpoint is written. The returned task ends when the new one is written."""
        async with self._beginning:
            await self.settled(self._deadlines.save_s)
            written = await self._compute.run(
                partial(self._learner.begin_save, journal_position),
                deadline_s=self._deadlines.step_s + self._deadlines.save_s,  # a step may be running
                what="copying the state for a checkpoint",
            )
            self._writing = asyncio.create_task(self._finish(asyncio.wrap_future(written)))
            self._writing.add_done_callback(lambda task: None if task.cancelled() else self._note(task.exception()))
            return self._writing

    async def _finish(self, written: asyncio.Future[Checkpoint]) -> Checkpoint:
        try:
            return await written
        except (ValueError, RuntimeError) as error:
            raise SluiceError.unavailable(
                "CHECKPOINT_NOT_WRITTEN",
                f"the ranks could not write a checkpoint together ({error}); older ones are untouched",
                retry_after_s=60.0,
            ) from error
        except OSError as error:
            raise SluiceError.resource_exhausted(
                "CHECKPOINT_NOT_WRITTEN",
                f"the checkpoint could not be written ({error}); older ones are untouched: free space below"
                f" {self._learner.checkpoints.directory}",
                retry_after_s=60.0,
            ) from error

    def _note(self, error: BaseException | None) -> None:
        self.last_error = "" if error is None else str(error)
        observe_checkpoint(written=error is None)
        if error is not None:
            log.error("checkpoint failed; training continues", error=str(error), exc_info=error)


# Step reports.


def _step_report(
    batch: Batch, applied: Applied, batch_wait_s: float, push_wait_s: float, pushed: PushReport | None
) -> StepReport:
    """Assemble and log the report of one step.

    Its metrics are the batch's (`Batch.metrics`), the optimizer steps' (the fields of `StepMetrics`, with ``/`` before a table's
    key), and:

        wait_batch_seconds, wait_push_seconds     waiting for this batch; for the push of an earlier version
        weights/diff_s, /push_s, /commit_s        the last push that ended: comparing with the previous version, sending, committing
        weights/bytes_sent, /dense_bytes          bytes that were sent, and bytes of a dense copy
        weights/changed_fraction                  share of the compared values that differ from the previous version
        weights/delta                             1 if the difference was sent, 0 if whole tensors were

    Args:
        batch: The batch.
        applied: The outcome of applying it.
        batch_wait_s: Seconds until the batch arrived.
        push_wait_s: Seconds until the push of an earlier version had ended.
        pushed: The last push that ended; None before the first.
    """
    of_step = dict(applied.metrics.as_flat()) if applied.metrics is not None else {}
    for name in of_step.keys() & batch.metrics.keys():
        if name.startswith("dropped_tokens/"):  # some were dropped on arrival, others in the step
            of_step[name] += batch.metrics[name]
    metrics = {**batch.metrics, **of_step, "wait_batch_seconds": batch_wait_s, "wait_push_seconds": push_wait_s}
    if pushed is not None:
        metrics |= {
            "weights/diff_s": pushed.diff_s,
            "weights/push_s": pushed.push_s,
            "weights/commit_s": pushed.commit_s,
            "weights/bytes_sent": float(pushed.bytes_sent),
            "weights/dense_bytes": float(pushed.dense_bytes),
            "weights/changed_fraction": pushed.changed_fraction,
            "weights/delta": float(pushed.kind == "delta"),
        }
    log.info(
        "step",
        version=str(batch.target),
        seconds=round(applied.seconds, 3),
        skipped=applied.record.skipped,
        staleness_max=batch.oldest,
        **{name: round(metrics[name], 4) for name in ("loss", "grad_norm") if name in metrics},
    )
    report = _recorded(applied.record)
    report.metrics.update({name: value for name, value in metrics.items() if math.isfinite(value)})
    report.duration.FromNanoseconds(int(applied.seconds * 1e9))
    return report


def _recorded(record: checkpoint_pb2.BatchRecord) -> StepReport:
    """Return the report of an applied batch from the record on disk, which has no metrics and no duration."""
    return StepReport(
        policy_version=record.policy_version,
        batch_id=record.batch_id,
        sequence_no=record.sequence_no,
        skipped=record.skipped,
        results=record.results,
        end_time=record.end_time,
        content_digest=record.content_digest,
    )


class StepLog:
    """The reports of one epoch by version number, without gaps. Each watcher reads it at its own pace.

    Args:
        begins_after: Version number from which the epoch began.
        held: Reports of the newest batches that this version holds, without a gap, from the record on disk.
    """

    def __init__(self, begins_after: int, held: Iterable[StepReport] = ()) -> None:
        self._reports: deque[StepReport] = deque(held, maxlen=KEPT_REPORTS)
        self._next = begins_after + 1
        self._changed = asyncio.Event()
        self._ended: SluiceError | None = None

    @property
    def first_number(self) -> int:
        """Number of the oldest report that is kept, or of the next one if none is kept."""
        return self._next - len(self._reports)

    def append(self, report: StepReport) -> None:
        """Add the next version's report."""
        self._reports.append(report)
        self._next += 1
        self._changed.set()

    def end(self, error: SluiceError) -> None:
        """End the log. Watchers first get the reports that they have not read yet, then this error."""
        self._ended = error
        self._changed.set()

    async def follow(self, from_number: int) -> AsyncIterator[StepReport]:
        """Yield the reports from a version number on, until the epoch ends.

        Args:
            from_number: First number to report; 0 is the oldest one kept.

        Raises:
            SluiceError: NOT_FOUND if a report is no longer kept; otherwise the error that ended the epoch.
        """
        number = from_number or self.first_number
        while True:
            while number < self._next:
                if number < self.first_number:
                    raise SluiceError.not_found(
                        "REPORT_NOT_KEPT",
                        f"the report of version {number} is not kept any more: watch from {self.first_number} on",
                    )
                yield self._reports[number - self.first_number]
                number += 1
            if self._ended is not None:
                raise self._ended
            self._changed.clear()
            await self._changed.wait()
