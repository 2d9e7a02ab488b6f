"""The trainings of all callers: their operations run one after another in the engine, each training's in order."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

import grpc
import structlog
import torch

from sluice.clock import CLOCK, Clock
from sluice.rpc import SluiceError
from sluice.tasks import settle
from sluice.v1 import training_pb2
from sluice.versions import BASE, Version
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.engine.finite import UnfitWeightsError
from trainer_svc.objectives.objective import Objective
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.tuner.adapters import AdapterBank, AdapterState, NoGradientError, StateError, load_state, save_state
from trainer_svc.tuner.config import TunerConfig
from trainer_svc.tuner.order import Entry, Refusal, RefusedError, Training, Turns
from trainer_svc.tuner.sampler import Sampler

STATE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SUFFIX = ".safetensors"

_T = TypeVar("_T")

RETRY_S = 1.0
"""Seconds after which a client should submit again, if waiting operations take too much memory."""

_WAITING_BYTES = 256 << 20
"""Most bytes of all operations that wait for the engine."""

LOOK_S = 30.0
"""Seconds between two checks for idle trainings."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AddGradient:
    """Add the gradient of a loss."""

    rows: tuple[TrainingRow, ...]
    objective: Objective
    divisor: float | None


@dataclass(frozen=True, slots=True)
class ApplyGradient:
    """Make an optimizer step."""

    learning_rate: float


@dataclass(frozen=True, slots=True)
class Save:
    """Write a state."""

    name: str


@dataclass(frozen=True, slots=True)
class Load:
    """Load a saved state."""

    name: str


@dataclass(frozen=True, slots=True)
class TakeSamples:
    """Sample."""

    request: training_pb2.SampleRequest


@dataclass(frozen=True, slots=True)
class Fail:
    """Fail, since the operation is malformed.

    Attributes:
        error: What is wrong.
        spoils: Whether a gradient is missing because of it.
    """

    error: SluiceError
    spoils: bool


Work: TypeAlias = AddGradient | ApplyGradient | Save | Load | TakeSamples | Fail
Waiting: TypeAlias = tuple[Work, int]
"""Work to do, and the bytes that it takes."""

Ended: TypeAlias = Entry[Waiting, training_pb2.Operation]


@dataclass(frozen=True, slots=True)
class Published:
    """The last publication of an adapter.

    Attributes:
        changes: `AdapterState.changes` of the published factors.
        version: Version under which the factors were published last.
        tensors: The factors, to publish them again if the weight service has removed the version.
    """

    changes: int
    version: Version
    tensors: Mapping[str, torch.Tensor]


@dataclass
class Held:
    """One training.

    Attributes:
        principal: The principal that owns it.
        request_id: Id of the request that created it.
        order: Its operations.
        published: The last publication; None before the first.
        spoilt: Whether a gradient since the last optimizer step is missing, because its operation failed.
        changed: Set and replaced whenever an operation ends.
        used: When its last operation arrived or ended, on the clock of the tuner.
        sampling: Its requests to replicas that are in progress.
        deleted: Whether it was deleted. Results of work that still runs are dropped.
    """

    name: str
    principal: str
    request_id: str
    state: AdapterState
    used: float
    order: Training[Waiting, training_pb2.Operation] = field(default_factory=Training)
    published: Published | None = None
    spoilt: bool = False
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    sampling: set[asyncio.Task[None]] = field(default_factory=set)
    deleted: bool = False


class Tuner:
    """Keeps the trainings, and runs their operations.

    Args:
        config: The settings.
        bank: Trains the adapters in the engine.
        sampler: Publishes the adapters and samples from them.
        compute: The thread that uses the engine.
        directory: Directory of saved states.
        clock: Measures how long trainings have been idle, and how long callers wait.
    """

    def __init__(
        self,
        config: TunerConfig,
        bank: AdapterBank,
        sampler: Sampler,
        compute: ComputeThread,
        directory: Path,
        *,
        clock: Clock = CLOCK,
    ) -> None:
        self._config, self.bank, self.sampler, self._compute = config, bank, sampler, compute
        self._directory, self._clock = directory, clock
        self._trainings: dict[str, Held] = {}
        self._turns = Turns()
        self._more = asyncio.Event()
        self._creating = asyncio.Lock()
        self._waiting_bytes = 0

    # Trainings.

    async def create(self, principal: str, request_id: str, seed: int) -> Held:
        """Create a training. Idempotent: a repeated request id returns the same training.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED if there are too many.
        """
        async with self._creating:
            mine = self.of(principal)
            known = next((each for each in mine if each.request_id == request_id), None)
            if known is not None:
                return known
            limits = self._config.limits
            if len(self._trainings) >= limits.trainings or len(mine) >= limits.per_principal:
                raise SluiceError.resource_exhausted(
                    "TOO_MANY_TRAININGS",
                    f"there are {len(self._trainings)} trainings, {len(mine)} of them yours; tuner.limits allows {limits.trainings}"
                    f" and {limits.per_principal}: delete one",
                    limits.idle_s,
                )
            state = await self._run(lambda: self.bank.create(seed), "creating an adapter")
            held = Held(f"trainings/{uuid.uuid4().hex[:12]}", principal, request_id, state, self._clock())
            self._trainings[held.name] = held
            self._turns.add(held.name)
            log.info("training created", training=held.name, principal=principal)
            return held

    def of(self, principal: str) -> list[Held]:
        """Return the trainings of a principal, oldest first."""
        return [each for each in self._trainings.values() if each.principal == principal]

    def find(self, principal: str, name: str) -> Held:
        """Return a training of a principal.

        Raises:
            SluiceError: NOT_FOUND.
        """
        held = self._trainings.get(name)
        if held is None or held.principal != principal:
            raise SluiceError.not_found(
                "UNKNOWN_TRAINING",
                f"you have no training {name!r}: it was deleted, or this service has restarted since; create one and load the"
                " last saved state",
            )
        return held

    def delete(self, principal: str, name: str) -> None:
        """Delete a training; do nothing if there is no training of this name."""
        held = self._trainings.get(name)
        if held is not None and held.principal == principal:
            self._remove(held)

    def _remove(self, held: Held) -> None:
        held.deleted = True
        self._waiting_bytes -= sum(size for _, size in held.order.waiting())
        del self._trainings[held.name]
        self._turns.remove(held.name)
        for task in held.sampling:
            task.cancel()
        self._wake(held)

    def states(self, principal: str) -> list[str]:
        """Return the names of a principal's saved states, sorted."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self._folder(principal).glob(f"*{SUFFIX}"))

    def _folder(self, principal: str) -> Path:
        return self._directory / f"of-{quote(principal, safe='')}"

    # Operations.

    def submit(self, held: Held, sequence_no: int, digest: str, size: int, work: Callable[[], Work]) -> Ended:
        """Accept an operation.

        Args:
            held: The training.
            sequence_no: Number of the operation.
            digest: Digest of the operation's content.
            size: Bytes that the operation takes while it waits.
            work: Returns the work to do; called only if the operation is new.

        Raises:
            SluiceError: ALREADY_EXISTS, OUT_OF_RANGE or RESOURCE_EXHAUSTED.
        """
        try:
            known = held.order.known(sequence_no, digest)
        except RefusedError as error:
            raise _refused(error) from error
        if known is not None:
            return known
        if self._waiting_bytes + size > _WAITING_BYTES:
            raise SluiceError.resource_exhausted(
                "OPERATIONS_FULL",
                f"operations of {self._waiting_bytes >> 20} MiB wait, the most that may: wait for their results",
                RETRY_S,
            )
        entry = held.order.submit(sequence_no, digest, (work(), size))
        self._waiting_bytes += size
        held.used = self._clock()
        self._more.set()
        return entry

    async def wait(self, held: Held, sequence_no: int, wait_s: float) -> training_pb2.Operation:
        """Return an operation when it has ended. After `wait_s` seconds return an empty one, which is not done.

        Raises:
            SluiceError: OUT_OF_RANGE, or NOT_FOUND if the training is deleted meanwhile.
        """
        until = self._clock() + wait_s
        while True:
            changed = held.changed
            try:
                entry = held.order.find(sequence_no)
            except RefusedError as error:
                if error.refusal is not Refusal.UNKNOWN:
                    raise _refused(error) from error
                entry = None
            if entry is not None and entry.outcome is not None:
                return entry.outcome
            left = until - self._clock()
            if held.deleted:
                self.find(held.principal, held.name)
            if left <= 0:
                return training_pb2.Operation()
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(left):
                    await changed.wait()

    @property
    def operations_left(self) -> int:
        """Number of operations that are in progress, or can run without waiting for another one to be submitted."""
        return sum(each.order.left for each in self._trainings.values())

    async def run_forever(self) -> None:
        """Run operations until cancelled."""
        while True:
            self._more.clear()
            name = self._turns.take({name for name, each in self._trainings.items() if each.order.ready})
            if name is None:
                await self._more.wait()
                continue
            held = self._trainings[name]
            entry, (work, size) = held.order.begin()
            self._waiting_bytes -= size
            if isinstance(work, TakeSamples):
                sampled = await self._prepared(held)
                task = asyncio.create_task(self._sample(held, entry, work, sampled), name=f"sample {held.name}")
                held.sampling.add(task)
                task.add_done_callback(held.sampling.discard)
            else:
                self._end(held, entry, await self._outcome(held, work))

    async def _prepared(self, held: Held) -> Callable[[], Awaitable[Published | None]]:
        """Copy the present factors. Return a function that publishes them, unless they are published, and returns the publication.

        The function returns None for an adapter that has never changed: it samples from the base model.
        """
        changes, known = held.state.changes, held.published
        if not changes:
            return _already(None)
        if known is not None and known.changes == changes:
            return _already(known)
        try:
            tensors = await self._run(lambda: self.bank.published(held.state), "copying an adapter")
        except (SluiceError, UnfitWeightsError) as error:
            failure = error  # raised later, inside of the operation

            async def fails() -> Published:
                raise failure

            return fails

        async def publish() -> Published:
            async with held.publishing:  # several samples of the same state publish it once
                if held.published is None or held.published.changes != changes:
                    await self._publish(held, changes, tensors)
                return held.published  # type: ignore[return-value]  # set by now

        return publish

    async def _publish(self, held: Held, changes: int, tensors: Mapping[str, torch.Tensor]) -> Published:
        version = await self.sampler.publish(tensors, self.bank.adapter.settings)
        held.published = Published(changes, version, tensors)
        return held.published

    async def _sample(
        self, held: Held, entry: Ended, work: TakeSamples, prepared: Callable[[], Awaitable[Published | None]]
    ) -> None:
        """Sample, concurrently with the operations that follow."""

        async def sample() -> training_pb2.Operation:
            published = await prepared()
            version = BASE if published is None else published.version
            work.request.request.tenant = held.principal
            try:
                response = await self.sampler.sample(version, work.request.request)
            except SluiceError as error:
                if published is None or error.code is not grpc.StatusCode.NOT_FOUND:
                    raise
                again = await self._publish(held, published.changes, published.tensors)
                version = again.version
                response = await self.sampler.sample(version, work.request.request)
            result = training_pb2.SampleResult(response=response, policy_version=version.to_proto())
            return training_pb2.Operation(done=True, sample=result)

        self._end(held, entry, await _caught(sample()))

    async def _outcome(
        self, held: Held, work: AddGradient | ApplyGradient | Save | Load | Fail
    ) -> training_pb2.Operation:
        spoilt = held.spoilt
        if isinstance(work, ApplyGradient | Load):
            held.spoilt = False
        operation = await _caught(self._run(lambda: self._compute_now(held, work, spoilt=spoilt), type(work).__name__))
        if operation.error and (isinstance(work, AddGradient) or (isinstance(work, Fail) and work.spoils)):
            held.spoilt = True
        return operation

    def _compute_now(
        self, held: Held, work: AddGradient | ApplyGradient | Save | Load | Fail, *, spoilt: bool
    ) -> training_pb2.Operation:
        """Run an operation of the engine. Call it in the compute thread."""
        match work:
            case Fail():
                raise work.error
            case AddGradient():
                added = self.bank.add_gradient(held.state, work.rows, work.objective, work.divisor)
                gradient = training_pb2.ForwardBackwardResult(
                    loss=added.loss, divisor=added.divisor, tokens=added.tokens, metrics=added.metrics
                )
                return training_pb2.Operation(done=True, forward_backward=gradient)
            case ApplyGradient():
                step = self.bank.step(held.state, work.learning_rate, whole=not spoilt)
                result = training_pb2.OptimStepResult(
                    grad_norm=step.grad_norm, skipped=step.skipped, optimizer_steps=held.state.optimizer_steps
                )
                return training_pb2.Operation(done=True, optim_step=result)
            case Save():
                return self._state_result(held, work.name, self._save(held, work.name))
            case Load():
                path = self._folder(held.principal) / f"{work.name}{SUFFIX}"
                held.state, digest = load_state(path, held.state)
                return self._state_result(held, work.name, digest)

    def _save(self, held: Held, name: str) -> str:
        kept, most = self.states(held.principal), self._config.limits.states
        if name not in kept and len(kept) >= most:
            raise SluiceError.failed_precondition(
                "TOO_MANY_STATES",
                f"you have {len(kept)} saved states, the most that tuner.limits.states allows: reuse a name",
            )
        return save_state(held.state, self._folder(held.principal) / f"{name}{SUFFIX}")

    def _state_result(self, held: Held, name: str, digest: str) -> training_pb2.Operation:
        result = training_pb2.StateResult(state=name, digest=digest, optimizer_steps=held.state.optimizer_steps)
        return training_pb2.Operation(done=True, state=result)

    async def _run(self, work: Callable[[], _T], what: str) -> _T:
        return await self._compute.run(work, deadline_s=self._config.deadlines.operation_s, what=what)

    def _end(self, held: Held, entry: Ended, operation: training_pb2.Operation) -> None:
        held.order.end(entry, operation)
        held.used = self._clock()
        self._wake(held)

    def _wake(self, held: Held) -> None:
        changed, held.changed = held.changed, asyncio.Event()
        changed.set()

    # The end.

    async def remove_idle(self) -> None:
        """Save and delete idle trainings. Runs until cancelled."""
        while True:
            await self._clock.sleep(min(LOOK_S, self._config.limits.idle_s))
            for held in list(self._trainings.values()):
                busy = held.sampling or held.order.ready
                if not busy and self._clock() - held.used > self._config.limits.idle_s:
                    await self._keep(held, "idle")
                    self._remove(held)

    async def stop(self) -> None:
        """End the requests of all trainings, and save the trainings."""
        for held in list(self._trainings.values()):
            for task in held.sampling:
                task.cancel()
            await settle(*held.sampling)
            await self._keep(held, "stopped")

    async def _keep(self, held: Held, why: str) -> None:
        """Save a training as ``WHY-ID``, unless it has made no optimizer step."""
        if not held.state.optimizer_steps:
            return
        name = f"{why}-{held.name.rpartition('/')[2]}"
        try:
            await self._run(lambda: self._save(held, name), "saving an adapter")
            log.info("training saved", training=held.name, principal=held.principal, state=name)
        except (SluiceError, OSError, UnfitWeightsError) as error:
            log.warning("a training could not be saved", training=held.name, error=str(error))


def _already(published: Published | None) -> Callable[[], Awaitable[Published | None]]:
    """Return a function that returns an existing publication."""

    async def known() -> Published | None:
        return published

    return known


async def _caught(work: Coroutine[Any, Any, training_pb2.Operation]) -> training_pb2.Operation:
    """Return the result of some work or, if it fails, an operation that has failed."""
    try:
        return await work
    except SluiceError as error:
        failure = error
    except NoGradientError as error:
        failure = SluiceError.failed_precondition("NO_GRADIENT", str(error))
    except UnfitWeightsError as error:
        failure = SluiceError.failed_precondition("NON_FINITE", str(error))
    except StateError as error:
        failure = SluiceError.data_loss("STATE_DAMAGED", str(error))
    except FileNotFoundError:
        failure = SluiceError.not_found("UNKNOWN_STATE", "you have no state of this name; ListTrainings lists them")
    except OSError as error:
        failure = SluiceError.unavailable("DISK_ERROR", f"the disk refused: {error.strerror}; see to it, and retry")
    except ValueError as error:
        failure = SluiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", str(error))
    except Exception as error:
        log.exception("an operation failed unexpectedly")
        failure = SluiceError(
            grpc.StatusCode.INTERNAL,
            "UNEXPECTED",
            f"the service failed unexpectedly ({type(error).__name__}); see its log",
        )
    return training_pb2.Operation(done=True, error=failure.to_status().SerializeToString())


def _refused(error: RefusedError) -> SluiceError:
    if error.refusal is Refusal.OTHER_OPERATION:
        return SluiceError.already_exists("SEQUENCE_NO_REUSED", f"{error}: give each operation a number of its own")
    return SluiceError(grpc.StatusCode.OUT_OF_RANGE, "WRONG_SEQUENCE_NO", f"{error}: go on from there, in steps of 1")
