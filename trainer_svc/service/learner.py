"""Training in one process: restore, apply a batch, encode, save. The code for rank 0, which leads, and for the ranks that follow.

A `Learner` blocks. The `ComputeThread` runs its calls one after another, so that version and weights never disagree.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from time import perf_counter
from typing import assert_never

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from sluice.batch_record import record_directory
from sluice.chat_template import set_chat_template, template_text
from sluice.config import CommonConfig
from sluice.render import tokenizer_digest
from sluice.rpc import SluiceError
from sluice.v1 import checkpoint_pb2
from sluice.v1.trainer_pb2 import Checkpoint
from sluice.versions import BASE, Version
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.checkpoint.batch_record import KEPT_REPORTS, BatchRecordFiles, MemoryShortages
from trainer_svc.checkpoint.checkpoints import Checkpoints, origin_of
from trainer_svc.checkpoint.saver import CheckpointDamagedError, Saver, export_state
from trainer_svc.checkpoint.state import training_state
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.finite import describe_unfit, some_of
from trainer_svc.engine.metrics import StepMetrics
from trainer_svc.engine.out_of_memory import REMEDY, MemoryShortError, first_line, is_out_of_memory
from trainer_svc.engine.rounding import DTYPES
from trainer_svc.objectives.objective import bypass_warning, estimator_warning, mismatch_warning
from trainer_svc.parallel.balance import Cost, balance
from trainer_svc.parallel.mesh import SINGLE, Mesh
from trainer_svc.precision import chosen_precision
from trainer_svc.service.admission import Known
from trainer_svc.service.batches import Batch
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.rank_group import (
    MAY_FAIL,
    Command,
    Encode,
    Load,
    Position,
    Publish,
    RankGroup,
    RankLink,
    Restore,
    Save,
    Stop,
    Train,
)
from trainer_svc.update.policy import PolicyUpdate, Updated, load_frozen
from weightsync.publisher import AdapterUpdate, PolicyPublisher, Update

FOR_GOOD_S = 366 * 86400.0
"""Seconds that a rank may serve rank 0: a year. Each command has its own deadline, but their number is not limited."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Applied:
    """The outcome of applying a batch.

    Attributes:
        record: The outcome of the batch and of each trajectory, as it is on disk.
        metrics: Report of the optimizer steps; None if nothing was left to train.
        skipped_steps: Optimizer steps that were skipped because loss or gradient was not finite.
    """

    record: checkpoint_pb2.BatchRecord
    metrics: StepMetrics | None
    skipped_steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Restored:
    """The state that an epoch begins from.

    Attributes:
        origin: Version at which the restored checkpoint was written; (0, 0) for the base model.
        last_batch_id: Last batch that the weights hold; empty for the base model.
        held: The newest batches that the weights hold and that are in the record on disk, oldest first.
    """

    version: Version
    origin: Version
    last_batch_id: str
    held: tuple[checkpoint_pb2.BatchRecord, ...] = ()

    @property
    def known(self) -> dict[str, Known]:
        """The batches whose repeats are recognised, by id."""
        last = {self.last_batch_id: Known(self.version.number)} if self.last_batch_id else {}
        return last | {each.batch_id: Known(each.sequence_no, each.content_digest) for each in self.held}


class StepAbandonedError(Exception):
    """The epoch of the running step has ended."""


class Learner:
    """One policy in training.

    Args:
        common: The run's settings.
        config: The trainer's settings.
        mesh: The ranks that train together.
        ranks: The other ranks, which carry out the commands of this one; None if there are none, or if this rank follows.
    """

    def __init__(
        self, common: CommonConfig, config: TrainerConfig, mesh: Mesh = SINGLE, ranks: RankGroup | None = None
    ) -> None:
        self.common = common
        self.config = config
        self.mesh = mesh
        self.ranks = ranks
        self.leads = mesh.rank == 0
        self.checkpoints = Checkpoints(
            common.run_dir / "checkpoints",
            config.checkpoint.keep,
            Saver.of(mesh, config.deadlines.save_s),
            epochs=common.run_dir / "trainer" / "epochs.binpb",
        )
        self.record = BatchRecordFiles(record_directory(common.run_dir))
        self.shortages = MemoryShortages(common.run_dir / "trainer", mesh.rank)
        self.version = BASE
        self.made_as = BASE
        """Version under which the weights were made. Until an epoch's first batch that is the epoch's origin, then `version`."""
        self.last_batch_id = ""
        self.newest_checkpoint: Checkpoint | None = None
        self.tokenizer_digest = ""
        self._chat_template: str | None = None
        self._update: PolicyUpdate | None = None
        self._frozen: dict[str, TrainEngine] = {}
        self._is_base = False
        self._advised: set[int] = set()
        self._abandoned = threading.Event()
        self._balance = partial(balance)

    @property
    def update(self) -> PolicyUpdate:
        """The update that trains the policy on a batch, with its networks.

        Raises:
            RuntimeError: before `load`.
        """
        if self._update is None:
            raise RuntimeError("the model is not loaded")
        return self._update

    @property
    def position(self) -> Position:
        """State that only rank 0 keeps up to date; the other ranks take it from the commands of rank 0."""
        return Position(self.version, self.made_as, self.last_batch_id)

    @position.setter
    def position(self, given: Position) -> None:
        self.version, self.made_as, self.last_batch_id = given.version, given.made_as, given.last_batch_id

    @property
    def engine(self) -> TrainEngine:
        """The policy's network and optimizer; raise RuntimeError before `load`."""
        return self.update.engine

    @property
    def optimizer_steps(self) -> int:
        """Steps of the policy's optimizer; 0 while the base model is loaded."""
        return 0 if self._update is None else self._update.engine.optimizer_steps

    @property
    def publish_dtype(self) -> torch.dtype:
        """Precision of the published weights."""
        return DTYPES[chosen_precision(self.config.publish_dtype, self.engine.device.type)]

    def load(self) -> None:
        """Load the base model, and read the checkpoints and epochs of the run."""
        arguments = self.common.chat_template_kwargs
        with self._on_all_ranks(Load()):
            self._chat_template = template_text(self.common.chat_template)
            self._frozen = load_frozen(self.config, self.common.model, mesh=self.mesh)
            self._make_abandonable(self._frozen.values())
            self._load_base()  # last, so that the random generators are in the state of the run's seed
            tokenizer = AutoTokenizer.from_pretrained(self.common.model)
            set_chat_template(tokenizer, self._chat_template, arguments)
        self.tokenizer_digest = tokenizer_digest(tokenizer, arguments)
        if self.leads:
            for warning in self.config.dead_clips:
                log.warning(warning)
            self.checkpoints.sweep()
        self.checkpoints.read_lineage()
        manifest = self.checkpoints.newest()
        self.newest_checkpoint = manifest.checkpoint if manifest else None

    def restore(self, epoch: int, checkpoint: str) -> Restored:
        """Begin an epoch from a checkpoint.

        Args:
            epoch: Number of the epoch.
            checkpoint: Name of the checkpoint; empty for the newest whole one, or for the base model if the run has no checkpoint.

        Raises:
            SluiceError: NOT_FOUND if there is no such checkpoint; DATA_LOSS if the files of the named checkpoint are damaged, or of
                all checkpoints if none is named. Nothing has changed then.
        """
        self._abandoned.clear()
        try:
            names = self._choose(checkpoint)
        except OSError as error:
            raise _unreadable("the list of checkpoints", error) from error
        with self._on_all_ranks(Restore(self.position, epoch, names)):
            origin, damage = self.restore_first_whole(epoch, names)
        if damage:
            raise SluiceError.data_loss("CHECKPOINT_DAMAGED", damage)
        log.info(
            "restored", version=str(self.version), origin=str(origin), checkpoint=self.last_batch_id or "base model"
        )
        self.shortages.read()
        held = self.record.held_by(self.version, self.checkpoints.lineage, KEPT_REPORTS) if self.leads else []
        return Restored(self.version, origin, self.last_batch_id, tuple(held))

    def restore_first_whole(self, epoch: int, names: Sequence[str]) -> tuple[Version, str]:
        """Begin an epoch from the first whole checkpoint of `names`; from the base model if `names` is empty.

        Returns:
            The version from which the epoch begins, and an empty text. If all checkpoints are damaged: `BASE`, and on every rank
            what is wrong with the last one. `self.version` is unchanged then.
        """
        manifest, damage = None, ""
        for place, name in enumerate(names):
            manifest = self.checkpoints.find(name)
            damage = self._load_checkpoint(name, manifest)
            if not damage:
                break
            older = names[place + 1] if place + 1 < len(names) else "none: there is no older one"
            log.warning("a checkpoint is damaged and is skipped", name=name, reason=damage, instead=older)
        if damage:
            return BASE, damage
        if not names:
            self._restore_base()
        origin = origin_of(manifest)
        self.checkpoints.begin_epoch(epoch, origin, write=self.leads)
        self.version = Version(epoch, origin.number)
        self.made_as = origin if origin.number else self.version
        self.last_batch_id = "" if manifest is None else manifest.checkpoint.last_batch_id
        return origin, ""

    def apply(self, batch: Batch) -> Applied:
        """Train on a batch and record it. The version advances even if every step was skipped.

        Raises:
            SluiceError: FAILED_PRECONDITION if the steps made weights that are not finite, or memory ran out in the middle. Then the
                batch does not count as applied, the weights are neither published nor written, and a new epoch has to begin from
                weights before the batch.
        """
        start = perf_counter()
        updated, trained = None, np.zeros((0, 2), np.int64)
        if batch.header.HasField("learning_rate"):
            self.engine.optimizer.changed_lr = batch.header.learning_rate
        if batch.sequences:
            updated, trained = self._train_on_all_ranks(batch.header.batch_id, batch.sequences)
            self._refuse_unfit(updated.unfit, f"batch {batch.header.batch_id!r}")
            updated = replace(updated, metrics=self._with_precision(updated.metrics, batch.header.sampler_dtype))
            self._advise(updated.metrics, batch)
        metrics = None if updated is None else updated.metrics
        record = checkpoint_pb2.BatchRecord(
            policy_version=batch.header.target_version,
            batch_id=batch.header.batch_id,
            sequence_no=batch.header.sequence_no,
            content_digest=batch.content_digest,
            skipped=metrics is not None and metrics.skipped,
            results=batch.results(trained, critic_only=updated is not None and updated.critic_only),
        )
        record.end_time.GetCurrentTime()
        seconds = perf_counter() - start
        self.record.append(record)
        self.shortages.applied(record.batch_id)
        self.version = self.made_as = batch.target
        self.last_batch_id = record.batch_id
        return Applied(record, metrics, 0 if updated is None else updated.skipped_steps, seconds)

    def _refuse_unfit(self, names: Sequence[str], what: str) -> None:
        if names:
            raise SluiceError.failed_precondition(
                "NON_FINITE", f"{what}: {describe_unfit(names, self.publish_dtype)}; no such version is published"
            )

    def _train_on_all_ranks(self, batch_id: str, sequences: Sequence[TrainingRow]) -> tuple[Updated, NDArray[np.int64]]:
        """Train on a batch. Return the outcome, and `Updated.rows` of all ranks in the batch's order."""
        halved = self.shortages.halves(batch_id)
        if self.ranks is None:
            try:
                updated, rows = self.train(batch_id, sequences, halved=halved)
            except MemoryShortError as error:
                raise SluiceError.failed_precondition("OUT_OF_MEMORY", str(error)) from error
            return updated, rows.numpy()
        command = Train(batch_id, halved, self.engine.optimizer.changed_lr)
        with self.ranks.on_all_ranks(command, sequences, assign=self._balance) as assignment:
            updated, rows = self.train(batch_id, assignment.rows, halved=halved)
        return updated, rows.numpy()[np.argsort(list(chain(*assignment.places)))]

    def train(self, batch_id: str, rows: Sequence[TrainingRow], *, halved: bool) -> tuple[Updated, torch.Tensor]:
        """Train on this rank's rows of a batch; the other ranks train on theirs at the same time.

        Args:
            batch_id: The batch.
            rows: This rank's rows.
            halved: Whether to train with half of the token budget.

        Returns:
            The outcome, and `Updated.rows` of all data-parallel ranks, in the order of ranks.

        Raises:
            MemoryShortError: if memory ran out and the pass could not be repeated. This is noted for the next epoch.
        """
        self._is_base = False
        try:
            updated = self.update.apply(rows, halved=halved)
            updated = replace(updated, unfit=self.update.unfit_weights(self.publish_dtype))
            return updated, self.engine.ranks.gather(updated.rows)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            short = error if isinstance(error, MemoryShortError) else self._short(error)
        self.shortages.note(batch_id, short)
        raise short

    def _short(self, error: Exception) -> MemoryShortError:
        """Return the error to raise if memory ran out outside of a pass over rows."""
        return MemoryShortError(f"memory ran out ({first_line(error)}): {REMEDY}", at_half=self.engine.budget.halved)

    @property
    def computes_in(self) -> str:
        """Return the precision of the forward pass, such as ``bfloat16``."""
        return str(self.engine.network.compute_dtype).removeprefix("torch.")

    def _with_precision(self, metrics: StepMetrics, sampled: str) -> StepMetrics:
        """Add the metric whether the engine's weights have another precision than the forward pass, if `sampled` is known."""
        if not sampled:
            return metrics
        return replace(metrics, measured={**metrics.measured, "precision_differs": float(sampled != self.computes_in)})

    def _advise(self, metrics: StepMetrics, batch: Batch) -> None:
        """Warn about settings that a step shows to be poor choices, once about each."""
        rounds = torch.bfloat16 in (self.engine.network.compute_dtype, self.publish_dtype)
        oldest = batch.oldest
        objective = self.update.objective.resolved
        advices = (
            bypass_warning(objective, metrics.measured, bf16=rounds, staleness=oldest),
            estimator_warning(objective, batch.header.advantage_estimator),
            mismatch_warning(
                metrics.measured, staleness=oldest, sampled=batch.header.sampler_dtype, computed=self.computes_in
            ),
        )
        for kind, advice in enumerate(advices):
            if advice and kind not in self._advised:
                log.warning(advice)
                self._advised.add(kind)

    def abandon(self) -> None:
        """End the running step at its next forward pass, without applying its batch, and likewise any later step before `restore`.

        This is the only method that another thread may call. With several ranks the step runs to its end, because the ranks
        would stop at different places.
        """
        if self.ranks is None:
            self._abandoned.set()

    def encode(self, publisher: PolicyPublisher, deadline_s: float) -> Update | AdapterUpdate:
        """Encode the weights for publication, compared with the previous version; or only the adapter, unless it is merged.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if the push of the previous version takes longer than `deadline_s`.
        """
        with self._on_all_ranks(Encode(self.position, deadline_s)):
            adapter, dtype = self.engine.adapter, self.publish_dtype
            if adapter is None or adapter.config.merges:
                tensors = self.engine.live_tensors()
                return publisher.weights.encode(self.version, tensors, dtype=dtype, deadline_s=deadline_s)
            return AdapterUpdate(self.version, adapter.tensors(dtype), adapter.settings)

    def begin_save(self, journal_position: int) -> Future[Checkpoint]:
        """Copy the state on every rank and write it in the background, unless a checkpoint of it exists.

        The checkpoint is named after the version under which its last batch is recorded, so an epoch without batches adds none.

        Returns:
            A future of the checkpoint. It is done when the manifest is on disk, or when writing has failed.
        """
        done: Future[Checkpoint] = Future()
        done.set_running_or_notify_cancel()
        try:
            existing = self.checkpoints.written(self.made_as, journal_position)
        except OSError as error:
            done.set_exception(error)
            return done
        if existing is not None:
            done.set_result(existing.checkpoint)
            return done
        with self._on_all_ranks(Save(self.position, journal_position)):
            writing = self.snapshot(journal_position)
        writing.add_done_callback(lambda written: self._saved(written, done))
        return done

    def snapshot(self, journal_position: int) -> Future[checkpoint_pb2.CheckpointManifest]:
        """Do this rank's part of a checkpoint: copy its state now, write its part in the background."""
        manifest = checkpoint_pb2.CheckpointManifest(
            checkpoint=Checkpoint(
                policy_version=self.made_as.to_proto(),
                last_batch_id=self.last_batch_id,
                journal_position=journal_position,
            ),
            run=f"runs/{self.common.run}",
            tokenizer_digest=self.tokenizer_digest,
            optimizer_steps=self.engine.optimizer_steps,
            next_sequence_no=self.version.number + 1,
        )

        def note_record() -> None:
            if (position := self.record.position()) is not None:
                manifest.batch_record.CopyFrom(position)

        state = training_state(self.update.engines, self.mesh.rank)
        export = partial(export_state, self.engine, dtype=self.publish_dtype)
        return self.checkpoints.begin(manifest, state, export, before=note_record)

    def _saved(self, written: Future[checkpoint_pb2.CheckpointManifest], done: Future[Checkpoint]) -> None:
        if (error := written.exception()) is not None:
            done.set_exception(error)
            return
        checkpoint = written.result().checkpoint
        self.newest_checkpoint = checkpoint
        log.info("checkpoint written", name=checkpoint.name, size_bytes=checkpoint.size_bytes)
        done.set_result(checkpoint)

    def _choose(self, name: str) -> list[str]:
        """Return the names of the checkpoints to try: the named one, else all from which training may continue, newest first.

        Raises:
            SluiceError: NOT_FOUND if there is no checkpoint of this name, UNAVAILABLE if writing a checkpoint takes too long.
        """
        try:
            self.checkpoints.saver.wait()  # the checkpoint being written may be the one to restore
        except TimeoutError as error:
            raise SluiceError.unavailable("CHECKPOINT_DEADLINE", str(error), retry_after_s=60.0) from error
        if not name:
            return [each.checkpoint.name for each in self.checkpoints.to_continue_from()]
        if self.checkpoints.find(name) is None:
            names = ", ".join(each.checkpoint.name for each in self.checkpoints.complete()) or "none"
            reason = self.checkpoints.incomplete().get(name, "there is no such directory")
            raise SluiceError.not_found(
                "NO_CHECKPOINT", f"there is no complete checkpoint {name!r} ({reason}); begin from one of: {names}"
            )
        return [name]

    def _on_all_ranks(self, command: Command) -> AbstractContextManager[object]:
        return nullcontext() if self.ranks is None else self.ranks.on_all_ranks(command)

    def _restore_base(self) -> None:
        if not self._is_base:
            self._update = None  # frees the memory of the old networks before the new ones are loaded
            self._load_base()
        self.engine.optimizer.changed_lr = None

    def _load_base(self) -> None:
        if self.common.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it for repeatable sums
            torch.use_deterministic_algorithms(True)
        update = PolicyUpdate.load(
            self.config,
            self.common.model,
            self.common.seed,
            mesh=self.mesh,
            frozen=self._frozen,
            chat_template=self._chat_template,
        )
        self._update = update
        self._make_abandonable(update.engines.values())
        # Rows without an advantage are not forwarded in the optimizer steps, but in the passes before them.
        objectives = [each.resolved for each in update.objectives.values()]
        left_out = not any(each.runs_estimator or each.needs_proximal for each in objectives)
        self._balance = partial(
            balance,
            cost=Cost.of(self.engine.network.model.config.get_text_config()),
            fold=self.config.fold_prompts,
            contributes=update.contributes if left_out else None,
        )
        self._is_base = True

    def _make_abandonable(self, engines: Iterable[TrainEngine]) -> None:
        for engine in engines:
            engine.network.model.base_model.register_forward_pre_hook(self._end_if_abandoned)

    def _end_if_abandoned(self, *_: object) -> None:
        if self._abandoned.is_set():
            raise StepAbandonedError

    def _load_checkpoint(self, name: str, manifest: checkpoint_pb2.CheckpointManifest | None) -> str:
        """Load a checkpoint. Return what is wrong with it, on every rank, if it is damaged."""
        if manifest is None:
            return f"checkpoint {name} is gone or not complete any more"
        if manifest.tokenizer_digest != self.tokenizer_digest:
            raise SluiceError.failed_precondition(
                "OTHER_MODEL",
                f"checkpoint {manifest.checkpoint.name} was written with another tokenizer, chat template or template arguments: resume with the model, chat_template and chat_template_kwargs of that run, or use a new run name",
            )
        was_base, self._is_base = self._is_base, False
        try:
            self.checkpoints.load(manifest, self.update.engines)
        except CheckpointDamagedError as error:
            self._is_base = was_base
            return str(error)
        except OSError as error:
            raise _unreadable(f"checkpoint {manifest.checkpoint.name}", error) from error
        except ValueError as error:
            raise SluiceError.failed_precondition("OTHER_MODEL", str(error)) from error
        if names := self.update.unfit_weights():
            return (
                f"checkpoint {name} holds weights that are not finite, or too large to compute with: {some_of(names)}"
            )
        return ""


def _unreadable(what: str, error: OSError) -> SluiceError:
    remedy = "check the disk and the limit of open files" if error.errno else "find the reason in the logs of all ranks"
    return SluiceError.unavailable(
        "CHECKPOINT_UNREADABLE",
        f"{what}, which may not be damaged, cannot be read ({error}): {remedy}, then begin the epoch again",
        retry_after_s=10.0,
    )


class FollowingRank:
    """On every other rank, carry out the commands of rank 0 in order, until rank 0 sends `Stop` or is gone.

    Commands that compute run in the compute thread; publications run concurrently.
    """

    def __init__(self, learner: Learner, link: RankLink, publisher: PolicyPublisher) -> None:
        self._learner, self._link, self._publisher = learner, link, publisher
        self._encoded: Update | AdapterUpdate | None = None

    async def run(self, compute: ComputeThread) -> int:
        """Carry out commands until rank 0 sends `Stop`.

        Returns:
            The exit code in `Stop`.

        Raises:
            Exception: the failure of a command, which was reported to rank 0.
        """
        computing = compute.run(self._compute, deadline_s=FOR_GOOD_S, what="serving rank 0")
        async with asyncio.TaskGroup() as tasks:
            computed = tasks.create_task(computing)
            tasks.create_task(self._publish())
        return computed.result()

    def _compute(self) -> int:
        while not isinstance(command := self._link.next("compute"), Stop):
            try:
                self._carry_out(command)
            except BaseException as error:
                if isinstance(command, MAY_FAIL) and isinstance(error, Exception):
                    log.warning("a command failed that may fail", command=type(command).__name__, error=str(error))
                else:
                    self._link.done(f"{type(error).__name__}: {error}")
                    raise
            self._link.done()
        return command.exit_code

    def _carry_out(self, command: Command) -> None:
        learner = self._learner
        if isinstance(command, Restore | Encode | Save):
            learner.position = command.position
        match command:
            case Load():
                learner.load()
            case Restore():
                learner.restore_first_whole(command.epoch, command.checkpoints)
            case Train():
                learner.engine.optimizer.changed_lr = command.changed_lr
                learner.train(command.batch_id, self._link.receive_rows(), halved=command.halved)
            case Encode():
                self._encoded = learner.encode(self._publisher, command.deadline_s)
            case Save():
                learner.snapshot(command.journal_position)  # rank 0 learns of a failure and reports it
            case Publish() | Stop():
                raise RuntimeError(f"{command} is not a command that computes; this is a defect")
            case _:
                assert_never(command)

    async def _publish(self) -> None:
        """Push this rank's part whenever rank 0 pushes its own. Rank 0 sees the same outcome and decides how to continue."""
        while isinstance(command := await asyncio.to_thread(self._link.next, "publish"), Publish):
            update = self._encoded
            if update is None or update.version != command.version:
                raise RuntimeError(f"rank 0 publishes {command.version}, this rank holds {update and update.version}")
            try:
                await self._publisher.publish(update, deadline_s=command.deadline_s)
            except SluiceError as error:
                if error.reason == "RANK_LOST":
                    raise
                log.warning("push failed", version=str(command.version), error=str(error))
