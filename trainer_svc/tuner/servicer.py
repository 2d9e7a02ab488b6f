# ruff: noqa: N802 - gRPC names the methods
"""The gRPC TrainingService: identify the caller, and check the form of operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import grpc
import xxhash
from pydantic import ValidationError

from sluice.rpc import SluiceError
from sluice.rpc.access import caller
from sluice.v1 import tokens_pb2, training_pb2, training_pb2_grpc
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective
from trainer_svc.objectives.presets import PRESETS
from trainer_svc.service.batches import Expectations, convert
from trainer_svc.tuner.tuner import (
    STATE_NAME,
    AddGradient,
    ApplyGradient,
    Fail,
    Held,
    Load,
    Save,
    TakeSamples,
    Tuner,
    Work,
)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

MOST_WAIT_S = 60.0
"""Longest time that one call waits for the result of an operation."""

MOST_SAMPLES = 256
"""Most samples of one request, as in RolloutService.Generate."""

MOST_TRAJECTORIES = 4096
"""Most trajectories of one operation."""

_SET_BY_SERVICE = frozenset({"run", "request_id", "adapter", "min_policy_version", "priority", "tenant"})
"""Fields of a request to a replica that only the service may set."""


class TrainingServicer(training_pb2_grpc.TrainingServiceServicer):
    """Serve the trainings of one base model.

    Args:
        run: `runs/{run}` of the service.
        tuner: Returns the tuner that runs the trainings; None while the model loads.
    """

    def __init__(self, run: str, tuner: Callable[[], Tuner | None]) -> None:
        self._run, self._find_tuner = run, tuner

    @property
    def _tuner(self) -> Tuner:
        tuner = self._find_tuner()
        if tuner is None:
            raise SluiceError.unavailable("LOADING", "the base model is being loaded: retry", 1.0)
        return tuner

    async def CreateTraining(
        self, request: training_pb2.CreateTrainingRequest, context: Context
    ) -> training_pb2.CreateTrainingResponse:
        """Create an adapter with its optimizer."""
        del context
        if request.run != self._run:
            raise SluiceError.failed_precondition(
                "WRONG_RUN", f"this service belongs to {self._run}, not to {request.run!r}: correct run or the address"
            )
        if not 1 <= len(request.request_id) <= 128:
            raise SluiceError.invalid_argument("request_id", f"has {len(request.request_id)} characters; give 1 to 128")
        held = await self._tuner.create(caller().name, request.request_id, request.seed % (1 << 63))
        return training_pb2.CreateTrainingResponse(training=self._described(held))

    async def ListTrainings(
        self, request: training_pb2.ListTrainingsRequest, context: Context
    ) -> training_pb2.ListTrainingsResponse:
        """List the caller's trainings and states."""
        del request, context
        tuner, name = self._tuner, caller().name
        return training_pb2.ListTrainingsResponse(
            trainings=map(self._described, tuner.of(name)), states=tuner.states(name)
        )

    async def DeleteTraining(
        self, request: training_pb2.DeleteTrainingRequest, context: Context
    ) -> training_pb2.DeleteTrainingResponse:
        """Delete a training."""
        del context
        self._tuner.delete(caller().name, request.training)
        return training_pb2.DeleteTrainingResponse()

    async def ForwardBackward(
        self, request: training_pb2.ForwardBackwardRequest, context: Context
    ) -> training_pb2.ForwardBackwardResponse:
        """Add the gradient of a loss."""
        del context

        def work() -> AddGradient:
            divisor = request.divisor if request.HasField("divisor") else None
            if divisor is not None and not (math.isfinite(divisor) and divisor > 0):
                raise SluiceError.invalid_argument(
                    "divisor", f"is {divisor}; give a finite number above 0, or leave it unset"
                )
            objective = _objective(request.objective, dict(request.parameters))
            return AddGradient(self._rows(request.trajectories, objective), objective, divisor)

        return training_pb2.ForwardBackwardResponse(operation=self._submitted(request, work))

    async def OptimStep(
        self, request: training_pb2.OptimStepRequest, context: Context
    ) -> training_pb2.OptimStepResponse:
        """Apply the gradient."""
        del context

        def work() -> ApplyGradient:
            if not (math.isfinite(request.learning_rate) and request.learning_rate >= 0):
                raise SluiceError.invalid_argument(
                    "learning_rate", f"is {request.learning_rate}; give a finite number, 0 or above"
                )
            return ApplyGradient(request.learning_rate)

        return training_pb2.OptimStepResponse(operation=self._submitted(request, work))

    async def SaveState(
        self, request: training_pb2.SaveStateRequest, context: Context
    ) -> training_pb2.SaveStateResponse:
        """Write a state."""
        del context
        return training_pb2.SaveStateResponse(
            operation=self._submitted(request, lambda: Save(_state_name(request.state)))
        )

    async def LoadState(
        self, request: training_pb2.LoadStateRequest, context: Context
    ) -> training_pb2.LoadStateResponse:
        """Take a saved state."""
        del context
        return training_pb2.LoadStateResponse(
            operation=self._submitted(request, lambda: Load(_state_name(request.state)))
        )

    async def Sample(self, request: training_pb2.SampleRequest, context: Context) -> training_pb2.SampleResponse:
        """Sample from the adapter."""
        del context

        def work() -> TakeSamples:
            for field, _ in request.request.ListFields():
                if field.name in _SET_BY_SERVICE:
                    raise SluiceError.invalid_argument(f"request.{field.name}", "is set by this service: leave it out")
            if request.request.WhichOneof("prompt") is None:
                raise SluiceError.invalid_argument(
                    "request.prompt", "is not set; give token_ids, text or a conversation"
                )
            if not 1 <= (request.request.n if request.request.HasField("n") else 1) <= MOST_SAMPLES:
                raise SluiceError.invalid_argument("request.n", f"is {request.request.n}; give 1 to {MOST_SAMPLES}")
            return TakeSamples(request)

        return training_pb2.SampleResponse(operation=self._submitted(request, work))

    async def WaitOperation(
        self, request: training_pb2.WaitOperationRequest, context: Context
    ) -> training_pb2.WaitOperationResponse:
        """Wait for a result."""
        del context
        wait_s = request.wait.ToNanoseconds() / 1e9
        if not 0 <= wait_s <= MOST_WAIT_S:
            raise SluiceError.invalid_argument("wait", f"is {wait_s:g} s; give 0 to {MOST_WAIT_S:g} s")
        tuner, number = self._tuner, _number(request)
        held = tuner.find(caller().name, request.place.training)
        return training_pb2.WaitOperationResponse(operation=await tuner.wait(held, number, wait_s))

    def _submitted(self, request: _Placed, work: Callable[[], Work]) -> training_pb2.Operation:
        tuner, number = self._tuner, _number(request)
        held = tuner.find(caller().name, request.place.training)
        content = type(request).__name__.encode() + request.SerializeToString(deterministic=True)

        def checked() -> Work:
            try:
                return work()
            except SluiceError as error:
                return Fail(error, spoils=isinstance(request, training_pb2.ForwardBackwardRequest))

        entry = tuner.submit(held, number, xxhash.xxh3_128_hexdigest(content), len(content), checked)
        return entry.outcome or training_pb2.Operation()

    def _rows(self, trajectories: Iterable[tokens_pb2.Trajectory], objective: Objective) -> tuple[Any, ...]:
        given = list(trajectories)
        if not 1 <= len(given) <= MOST_TRAJECTORIES:
            raise SluiceError.invalid_argument(
                "trajectories", f"has {len(given)} entries; give 1 to {MOST_TRAJECTORIES}"
            )
        settings, tuner = objective.resolved, self._tuner
        expected = Expectations(
            vocabulary=tuner.bank.engine.network.vocabulary,
            newest=tuner.sampler.newest,
            has_estimator=not settings.advantage,
            needs_reference=settings.needs_reference,
            needs_teacher=settings.needs_teacher,
        )
        samples, violations = convert(given, expected)
        if settings.needs_behaviour:
            for index, each in enumerate(given):
                if len(each.mask_runs) > 1 and not each.logprobs:
                    violations[f"trajectories[{index}].logprobs"] = f"are absent, but {settings.name} reads them"
        if violations:
            raise SluiceError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_FIELD",
                "; ".join(f"{name} {fault}" for name, fault in list(violations.items())[:3]),
                violations=violations,
            )
        return tuple(each.sequence for each in samples)

    def _described(self, held: Held) -> training_pb2.Training:
        settings = self._tuner.bank.adapter.config
        return training_pb2.Training(
            name=held.name,
            rank=settings.rank,
            alpha=settings.alpha,
            next_sequence_no=held.order.next_sequence_no,
            optimizer_steps=held.state.optimizer_steps,
        )


_Placed: TypeAlias = Any
"""A request that has the field `place`."""


def _number(request: _Placed) -> int:
    number: int = request.place.sequence_no
    if number < 1:
        raise SluiceError.invalid_argument("place.sequence_no", "is not set; the first operation has 1")
    return number


def _state_name(name: str) -> str:
    if not STATE_NAME.fullmatch(name):
        raise SluiceError.invalid_argument("state", f"is {name[:80]!r}; give a name of the form {STATE_NAME.pattern}")
    return name


def _objective(name: str, parameters: dict[str, float]) -> Objective:
    """Return the objective of a request.

    Raises:
        SluiceError: INVALID_ARGUMENT if no objective has this name, a parameter is wrong, or the objective needs more than one
            forward pass.
    """
    if name not in PRESETS:  # a loss of the user's own would be imported here
        raise SluiceError.invalid_argument("objective", f"is {name!r}; there are {', '.join(PRESETS)}")
    try:
        settings = ObjectiveConfig.model_validate({**parameters, "preset": name})
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
        raise SluiceError.invalid_argument("parameters", faults) from error
    resolved = settings.resolved
    if resolved.runs_estimator or resolved.needs_critic or resolved.needs_proximal or resolved.proximal == "loglinear":
        raise SluiceError.invalid_argument(
            "objective",
            f"{name} needs a critic, an estimator of the trainer or a forward pass of its own: choose another one",
        )
    return Objective.of(settings)
