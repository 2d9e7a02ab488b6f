"""Write your own training loop: gradients, optimizer steps and samples of an adapter, computed by `sluice tuner`.

    async with Tuning("127.0.0.1:7108") as tuning:
        training = await tuning.create(run="mine", name="first", seed=0)
        samples = await (await training.sample("2 + 2 =", n=8))
        rows = [row(samples, index, advantage) for index, advantage in enumerate(advantages)]
        await training.forward_backward(rows, objective="grpo")
        step = await training.optim_step(1e-3)
        print(await step)

Each call sends an operation and returns a `Pending`, which gives the result when it is awaited. Operations take effect in the order of the
calls, in whatever order their results are awaited. A call waits while `MOST_AHEAD` earlier operations have not ended. A call that could not
be delivered is retried, and takes effect once.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import grpc
from google.rpc.status_pb2 import Status

from sluice.backoff import Backoff
from sluice.client import Prompt, generate_request
from sluice.rpc import ClientSecurity, SluiceError, connect
from sluice.v1 import rollout_pb2, tokens_pb2, training_pb2, training_pb2_grpc
from sluice.versions import BASE

if TYPE_CHECKING:
    from sluice.rpc.client_security import Security

CALL_S = 30.0
"""Deadline of one call in seconds."""

PATIENCE_S = 120.0
"""Seconds for which a call is repeated while the service cannot be reached."""

MOST_AHEAD = 48
"""Operations that may be sent before the first of them has ended. The service accepts 64."""

WAIT_S = 30.0
"""Seconds that one call waits for a result. Then another call asks for it."""

_AGAIN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
"""Status codes after which a call is retried. An error with RESOURCE_EXHAUSTED says when."""

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer")


class Pending(Generic[_Result]):
    """The result of an operation, which may still run. It may be awaited more than once.

    Awaiting raises the SluiceError that the operation failed with, or DEADLINE_EXCEEDED after `timeout_s`; the operation then continues.
    """

    def __init__(
        self, training: Training, sequence_no: int, read: Callable[[training_pb2.Operation], _Result], timeout_s: float
    ) -> None:
        self._training, self.sequence_no, self._read, self._timeout_s = training, sequence_no, read, timeout_s

    def __await__(self) -> Generator[Any, None, _Result]:
        """Wait for the result."""
        return self._wait().__await__()

    async def _wait(self) -> _Result:
        operation = await self._training.wait(self.sequence_no, self._timeout_s)
        if operation.error:
            raise SluiceError.from_status(Status.FromString(operation.error))
        return self._read(operation)


class Training:
    """One adapter with its optimizer; `Tuning.create` makes it. Use it from one event loop."""

    def __init__(self, stub: training_pb2_grpc.TrainingServiceAsyncStub, created: training_pb2.Training) -> None:
        self._stub, self.name, self.rank = stub, created.name, created.rank
        self._next = created.next_sequence_no

    async def forward_backward(
        self,
        rows: Iterable[tokens_pb2.Trajectory],
        *,
        objective: str,
        parameters: Mapping[str, float] | None = None,
        divisor: float | None = None,
    ) -> Pending[training_pb2.ForwardBackwardResult]:
        """Add the gradient of a loss; see `row` and `demonstration` for the rows.

        Args:
            rows: At most 4 MiB of them.
            objective: A name of the table of objectives, such as ``grpo`` or ``sft``.
            parameters: Its settings, such as ``{"eps_high": 0.28}``.
            divisor: Divisor of the summed loss. None: the objective's own divisor for these rows.
        """
        request = training_pb2.ForwardBackwardRequest(
            trajectories=rows, objective=objective, parameters=parameters or {}, divisor=divisor
        )
        return await self._send(self._stub.ForwardBackward, request, lambda each: each.forward_backward)

    async def optim_step(self, learning_rate: float) -> Pending[training_pb2.OptimStepResult]:
        """Apply the gradient."""
        request = training_pb2.OptimStepRequest(learning_rate=learning_rate)
        return await self._send(self._stub.OptimStep, request, lambda each: each.optim_step)

    async def save(self, state: str) -> Pending[training_pb2.StateResult]:
        """Save adapter and optimizer under a name. An earlier state of that name is replaced."""
        request = training_pb2.SaveStateRequest(state=state)
        return await self._send(self._stub.SaveState, request, lambda each: each.state)

    async def load(self, state: str) -> Pending[training_pb2.StateResult]:
        """Restore adapter and optimizer from a saved state."""
        request = training_pb2.LoadStateRequest(state=state)
        return await self._send(self._stub.LoadState, request, lambda each: each.state)

    async def sample(
        self, prompt: Prompt, sampling: tokens_pb2.SamplingParams | None = None, *, n: int = 1, timeout_s: float = 600.0
    ) -> Pending[rollout_pb2.GenerateResponse]:
        """Sample `n` continuations from the adapter in its state after all earlier operations."""
        inner = generate_request(prompt, sampling, n, "")
        inner.return_text = True
        request = training_pb2.SampleRequest(request=inner)
        return await self._send(self._stub.Sample, request, lambda each: each.sample.response, timeout_s)

    async def wait(self, sequence_no: int, timeout_s: float) -> training_pb2.Operation:
        """Wait until an operation has ended, and return it.

        Raises:
            SluiceError: DEADLINE_EXCEEDED after `timeout_s`; otherwise as for WaitOperation.
        """
        until = time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            request = training_pb2.WaitOperationRequest(place=self._place(sequence_no))
            request.wait.FromNanoseconds(int(max(0.0, min(WAIT_S, left)) * 1e9))
            answer = await _patiently(partial(self._stub.WaitOperation, request, timeout=WAIT_S + CALL_S))
            if answer.operation.done:
                return answer.operation
            if left <= 0:
                raise SluiceError(
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    "DEADLINE_EXCEEDED",
                    f"operation {sequence_no} of {self.name} did not end within {timeout_s:g} s; it continues: await it again",
                )

    async def delete(self) -> None:
        """Delete the training; its saved states stay."""
        request = training_pb2.DeleteTrainingRequest(training=self.name)
        await _patiently(lambda: self._stub.DeleteTraining(request, timeout=CALL_S))

    def _place(self, sequence_no: int) -> training_pb2.OperationPlace:
        return training_pb2.OperationPlace(training=self.name, sequence_no=sequence_no)

    async def _send(
        self,
        method: Callable[..., Awaitable[Any]],
        request: Any,  # noqa: ANN401 - any request with a place
        read: Callable[[training_pb2.Operation], _Result],
        timeout_s: float = 3600.0,
    ) -> Pending[_Result]:
        number = self._next
        self._next += 1  # before the first await, so that operations keep the order of the calls
        request.place.CopyFrom(self._place(number))
        if number > MOST_AHEAD:
            await self.wait(number - MOST_AHEAD, timeout_s)
        await _patiently(lambda: method(request, timeout=CALL_S))
        return Pending(self, number, read, timeout_s)


class Tuning:
    """A connection to `sluice tuner`.

    Args:
        target: ``host:port``.
        security: Token and TLS; the role `tenant` is enough.
    """

    def __init__(self, target: str, security: Security | None = None) -> None:
        self._channel = connect(target, security or ClientSecurity(), role="agent")
        self._stub = training_pb2_grpc.TrainingServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._channel.close()

    async def create(self, run: str, *, seed: int = 0, name: str = "") -> Training:
        """Create an adapter that changes nothing yet, with its optimizer.

        Args:
            run: Name of the service's run.
            seed: Decides the initial factors.
            name: Name of the training; it makes the call idempotent. If it is empty, a name is chosen.
        """
        request = training_pb2.CreateTrainingRequest(run=f"runs/{run}", request_id=name or uuid.uuid4().hex, seed=seed)
        created = await _patiently(lambda: self._stub.CreateTraining(request, timeout=CALL_S))
        return Training(self._stub, created.training)

    async def list(self) -> training_pb2.ListTrainingsResponse:
        """Return the trainings and the saved states of this caller."""
        request = training_pb2.ListTrainingsRequest()
        return await _patiently(lambda: self._stub.ListTrainings(request, timeout=CALL_S))


def row(
    response: rollout_pb2.GenerateResponse, index: int, advantage: float, *, temperature: float = 1.0
) -> tokens_pb2.Trajectory:
    """Return a sample as a row for `Training.forward_backward`: its prompt is not trained, each sampled token is.

    Args:
        response: Result of `Training.sample`.
        index: Index of the sample in it.
        advantage: Advantage of each of its tokens.
        temperature: Temperature at which it was sampled.
    """
    sample, prompt = response.samples[index], response.prompt_token_ids
    return tokens_pb2.Trajectory(
        trajectory_id=f"{response.request_id}/{index}",
        group_id=response.request_id,
        episode_id=f"{response.request_id}/{index}",
        token_ids=[*prompt, *sample.token_ids],
        mask_runs=[len(prompt), len(sample.token_ids)],
        logprobs=sample.logprobs,
        version_spans=sample.version_spans,
        temperature=temperature,
        advantages=[advantage],
    )


def demonstration(prompt: Sequence[int], completion: Sequence[int]) -> tokens_pb2.Trajectory:
    """Return token ids as a row for the objective ``sft``: the prompt is not trained, the completion is."""
    name = uuid.uuid4().hex
    return tokens_pb2.Trajectory(
        trajectory_id=name,
        group_id=name,
        episode_id=name,
        token_ids=[*prompt, *completion],
        mask_runs=[len(prompt), len(completion)],
        version_spans=[tokens_pb2.VersionSpan(policy_version=BASE.to_proto())],
        temperature=1.0,
    )


async def _patiently(call: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Make a call, and retry it while the service cannot be reached. Every call here is idempotent."""
    until, backoff = time.monotonic() + PATIENCE_S, Backoff(first_s=0.1, longest_s=2.0)
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            failed = SluiceError.from_rpc(error)
            pause_s = failed.retry_after_s or backoff.fail()
            again = failed.code in _AGAIN
            if not again or time.monotonic() + pause_s > until:
                raise failed from error
            await asyncio.sleep(pause_s)
