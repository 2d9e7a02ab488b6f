"""Typed async clients of the four services, for scripts and notebooks; failures are `SluiceError`s.

    async with RolloutClient("127.0.0.1:7103") as rollout:
        answer = await rollout.generate([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=16))
        print(answer.samples[0].text)

Methods without a `timeout_s` have the channel's default deadline. For other calls use the generated stubs of `sluice.v1` on
`sluice.rpc.connect`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import grpc

from sluice.limits import MAX_MESSAGE_BYTES
from sluice.rpc import ClientSecurity, SluiceError, connect
from sluice.rpc.channel import TOO_OLD
from sluice.v1 import (
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    tokens_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
    weightsync_pb2,
    weightsync_pb2_grpc,
)
from sluice.versions import Version

if TYPE_CHECKING:  # a client needs grpcio and protobuf alone
    from sluice.rpc.client_security import Security
    from sluice.rpc.principals import Role

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | tokens_pb2.Conversation
"""Text, token ids, messages as ``{"role": ..., "content": ...}``, or a conversation with tools."""

_PIECE_VALUES = 1 << 15
"""Values of a repeated field in one piece of a large trajectory: at most 10 bytes each, or a span of versions of some dozens."""

_PART_BYTES = 512 << 10
"""Size of a message with trajectories. Between two messages the event loops of both sides can serve other calls."""

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


async def _typed(call: Awaitable[_Answer]) -> _Answer:
    """Await a unary call; raise the error that the server raised."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise SluiceError.from_rpc(error) from error


async def _stream(call: grpc.aio.UnaryStreamCall[_Request, _Answer]) -> AsyncGenerator[_Answer, None]:
    """Yield a stream's messages; leaving the loop cancels the call."""
    try:
        async for message in call:
            yield message
    except grpc.aio.AioRpcError as error:
        raise SluiceError.from_rpc(error) from error
    finally:
        call.cancel()


async def _resumed(
    watch: grpc.aio.UnaryStreamMultiCallable[_Request, _Answer],
    request: _Request,
    seen: Callable[[_Answer], None],
    timeout_s: float | None,
) -> AsyncIterator[_Answer]:
    """Yield a watch's messages. If the server ends it for its age, watch again.

    Args:
        watch: The method.
        request: What to watch.
        seen: Updates the request so that a further watch begins after the given message.
        timeout_s: Seconds in all; None uses the channel's deadline.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = None if end is None else max(0.0, end - time.monotonic())
        try:
            async with contextlib.aclosing(_stream(watch(request, timeout=left_s))) as answers:
                async for answer in answers:
                    seen(answer)
                    yield answer
        except SluiceError as error:
            if error.reason != TOO_OLD:
                raise
        else:
            return


def _run_name(run: str) -> str:
    return run if not run or run.startswith("runs/") else f"runs/{run}"


class _Client:
    """Owns a channel."""

    def __init__(self, target: str, security: Security | None = None, *, role: Role = "admin") -> None:
        self.target = target
        self._channel = connect(target, security or ClientSecurity(), role=role)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


class RolloutClient(_Client):
    """Samples from a replica, or from all of them behind one DNS name; role ``agent`` is enough to generate."""

    def __init__(self, target: str, security: Security | None = None, *, role: Role = "admin") -> None:
        super().__init__(target, security, role=role)
        self._agent = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._admin = rollout_pb2_grpc.RolloutAdminServiceStub(self._channel)

    async def generate(
        self,
        prompt: Prompt,
        sampling: tokens_pb2.SamplingParams | None = None,
        *,
        n: int = 1,
        run: str = "",
        adapter: str = "",
        return_text: bool = True,
        timeout_s: float = 600.0,
    ) -> rollout_pb2.GenerateResponse:
        """Sample `n` continuations and wait for all of them, by the policy or by an adapter that `load_adapter` named.

        Raises:
            SluiceError: as listed at RolloutService.Generate.
        """
        request = generate_request(prompt, sampling, n, run)
        request.adapter, request.return_text = adapter, return_text
        return await _typed(self._agent.Generate(request, timeout=timeout_s))

    def stream(
        self,
        prompt: Prompt,
        sampling: tokens_pb2.SamplingParams | None = None,
        *,
        n: int = 1,
        run: str = "",
        timeout_s: float = 600.0,
    ) -> AsyncIterator[rollout_pb2.GenerateStreamResponse]:
        """Sample `n` continuations and receive their tokens as they come; close the iterator to abort.

        Each message has the new tokens of all samples in ``chunk.deltas``, or none if the request waits. The first has an
        ``opening``, too.
        """
        request = rollout_pb2.GenerateStreamRequest(request=generate_request(prompt, sampling, n, run))
        return _stream(self._agent.GenerateStream(request, timeout=timeout_s))

    async def model(self) -> rollout_pb2.GetModelResponse:
        """Describe the served model."""
        return await _typed(self._agent.GetModel(rollout_pb2.GetModelRequest()))

    async def status(self) -> rollout_pb2.GetStatusResponse:
        """Return version, load and health of the replica."""
        return await _typed(self._admin.GetStatus(rollout_pb2.GetStatusRequest()))

    async def drain(self, grace_s: float | None = None) -> rollout_pb2.DrainResponse:
        """Let the replica take no new requests, finish the requests in progress within the grace, and end.

        Args:
            grace_s: Seconds; 0 ends the requests at once with the tokens so far, None uses the replica's own grace.
        """
        request = rollout_pb2.DrainRequest()
        if grace_s is not None:
            request.grace.FromNanoseconds(int(grace_s * 1e9))
        return await _typed(self._admin.Drain(request))

    async def update_weights(
        self, version: Version | None = None, *, timeout_s: float = 120.0
    ) -> rollout_pb2.UpdateWeightsResponse:
        """Make the replica serve a version, by default the newest, and wait until it does."""
        request = rollout_pb2.UpdateWeightsRequest(version=None if version is None else version.to_proto())
        return await _typed(self._admin.UpdateWeights(request, timeout=timeout_s))

    async def reload_weights(self, *, timeout_s: float = 120.0) -> rollout_pb2.ReloadWeightsResponse:
        """Make the replica serve the base model again."""
        return await _typed(self._admin.ReloadWeights(rollout_pb2.ReloadWeightsRequest(), timeout=timeout_s))

    async def verify_weights(
        self, fraction: float = 1.0, *, timeout_s: float = 600.0
    ) -> rollout_pb2.VerifyWeightsResponse:
        """Compare the engine's live weights, or a fraction of their tensors, with the files of their version."""
        request = rollout_pb2.VerifyWeightsRequest(fraction=fraction)
        return await _typed(self._admin.VerifyWeights(request, timeout=timeout_s))

    async def load_adapter(self, name: str, version: Version, *, timeout_s: float = 120.0) -> None:
        """Give an adapter version a name for `generate`."""
        request = rollout_pb2.LoadAdapterRequest(adapter=name, version=version.to_proto())
        await _typed(self._admin.LoadAdapter(request, timeout=timeout_s))

    async def unload_adapter(self, name: str, *, timeout_s: float = 120.0) -> None:
        """Remove a name; its requests end with VERSION_RETIRED."""
        await _typed(self._admin.UnloadAdapter(rollout_pb2.UnloadAdapterRequest(adapter=name), timeout=timeout_s))

    async def pause(
        self, mode: rollout_pb2.PauseMode.ValueType, owner: str, *, ttl_s: float = 60.0
    ) -> rollout_pb2.PauseResponse:
        """Stop sampling until `resume`, for `ttl_s` seconds at most."""
        request = rollout_pb2.PauseRequest(mode=mode, owner=owner)
        request.ttl.FromMilliseconds(int(ttl_s * 1000))
        return await _typed(self._admin.Pause(request, timeout=ttl_s))

    async def resume(self, owner: str) -> rollout_pb2.ResumeResponse:
        """End the owner's pause."""
        return await _typed(self._admin.Resume(rollout_pb2.ResumeRequest(owner=owner)))


class TrainerClient(_Client):
    """Hands batches to a trainer and reads its reports."""

    def __init__(self, target: str, security: Security | None = None) -> None:
        super().__init__(target, security)
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)

    async def begin_epoch(
        self, run: str, epoch: int, *, checkpoint: str = "", timeout_s: float = 600.0
    ) -> trainer_pb2.BeginEpochResponse:
        """Restore a checkpoint (by default the newest), publish its weights, and begin to accept batches."""
        request = trainer_pb2.BeginEpochRequest(run=_run_name(run), epoch=epoch, checkpoint=checkpoint)
        return await _typed(self._stub.BeginEpoch(request, timeout=timeout_s))

    async def submit_batch(
        self, header: trainer_pb2.BatchHeader, trajectories: Sequence[tokens_pb2.Trajectory], *, timeout_s: float = 60.0
    ) -> trainer_pb2.SubmitBatchResponse:
        """Send one batch; return when it is queued. Safe to repeat with the same batch id.

        Raises:
            SluiceError: as listed at TrainerService.SubmitBatch; RESOURCE_EXHAUSTED while the queue is full.
        """
        return await _typed(self._stub.SubmitBatch(_batch_parts(header, trajectories), timeout=timeout_s))

    async def state(self, run: str) -> trainer_pb2.GetTrainerStateResponse:
        """Return phase, version and queue of the trainer."""
        return await _typed(self._stub.GetTrainerState(trainer_pb2.GetTrainerStateRequest(run=_run_name(run))))

    def watch_steps(
        self, run: str, from_number: int = 0, *, timeout_s: float | None = None
    ) -> AsyncIterator[trainer_pb2.WatchStepsResponse]:
        """Yield the reports of applied batches, past ones first, for a day unless `timeout_s` says otherwise."""
        request = trainer_pb2.WatchStepsRequest(run=_run_name(run), from_number=from_number)

        def seen(answer: trainer_pb2.WatchStepsResponse) -> None:
            request.from_number = answer.step.policy_version.number + 1

        return _resumed(self._stub.WatchSteps, request, seen, timeout_s)

    async def save_checkpoint(
        self, run: str, journal_position: int = 0, *, timeout_s: float = 600.0
    ) -> trainer_pb2.SaveCheckpointResponse:
        """Write a checkpoint between two batches and wait until it is on disk."""
        request = trainer_pb2.SaveCheckpointRequest(run=_run_name(run), journal_position=journal_position)
        return await _typed(self._stub.SaveCheckpoint(request, timeout=timeout_s))

    async def keep_checkpoint(self, run: str, checkpoint: str, reason: str) -> None:
        """Keep one checkpoint besides the newest ones. It replaces the checkpoint that an earlier call kept."""
        request = trainer_pb2.KeepCheckpointRequest(run=_run_name(run), checkpoint=checkpoint, reason=reason)
        await _typed(self._stub.KeepCheckpoint(request))

    async def checkpoints(self, run: str) -> list[trainer_pb2.Checkpoint]:
        """Return the complete checkpoints, newest first."""
        found: list[trainer_pb2.Checkpoint] = []
        request = trainer_pb2.ListCheckpointsRequest(run=_run_name(run))
        while True:
            page = await _typed(self._stub.ListCheckpoints(request))
            found.extend(page.checkpoints)
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token


class OrchestratorClient(_Client):
    """Watches and steers a run."""

    def __init__(self, target: str, security: Security | None = None) -> None:
        super().__init__(target, security)
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    async def run(self, run: str) -> orchestrator_pb2.Run:
        """Return the state of the run."""
        answer = await _typed(self._stub.GetRun(orchestrator_pb2.GetRunRequest(run=_run_name(run))))
        return answer.run

    def watch(
        self, run: str, from_sequence_no: int = 0, *, timeout_s: float | None = None
    ) -> AsyncIterator[orchestrator_pb2.WatchRunResponse]:
        """Yield the events of the run, past ones first, until it ends, for a day unless `timeout_s` says otherwise."""
        request = orchestrator_pb2.WatchRunRequest(run=_run_name(run), from_sequence_no=from_sequence_no)

        def seen(answer: orchestrator_pb2.WatchRunResponse) -> None:
            request.from_sequence_no = answer.event.sequence_no + 1

        return _resumed(self._stub.WatchRun, request, seen, timeout_s)

    async def pause(self, run: str) -> orchestrator_pb2.Run:
        """Stop dispatching new episodes."""
        return (await _typed(self._stub.PauseRun(orchestrator_pb2.PauseRunRequest(run=_run_name(run))))).run

    async def resume(self, run: str) -> orchestrator_pb2.Run:
        """Dispatch new episodes again."""
        return (await _typed(self._stub.ResumeRun(orchestrator_pb2.ResumeRunRequest(run=_run_name(run))))).run

    async def stop(self, run: str, reason: str = "") -> orchestrator_pb2.Run:
        """End the run with a last checkpoint and the report."""
        request = orchestrator_pb2.StopRunRequest(run=_run_name(run), reason=reason)
        return (await _typed(self._stub.StopRun(request))).run

    async def set(self, run: str, values: Mapping[str, str]) -> list[orchestrator_pb2.ChangedSetting]:
        """Change settings of the live run, such as ``{"trainer.lr": "5e-7"}``, all or none; return those that changed.

        Raises:
            SluiceError: INVALID_ARGUMENT with the settings that can be changed.
        """
        request = orchestrator_pb2.SetRunRequest(run=_run_name(run), values=values)
        return list((await _typed(self._stub.SetRun(request))).changed)

    async def trajectories(
        self, run: str, *, limit: int = 50, step: int | None = None, reward_below: float | None = None
    ) -> list[orchestrator_pb2.TrajectoryRecord]:
        """Return at most `limit` of the newest trajectories, with their text."""
        found: list[orchestrator_pb2.TrajectoryRecord] = []
        request = orchestrator_pb2.ListTrajectoriesRequest(
            run=_run_name(run), page_size=min(limit, 50), step=step, reward_below=reward_below
        )
        while len(found) < limit:
            page = await _typed(self._stub.ListTrajectories(request))
            found.extend(page.trajectories)
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        return found[:limit]


class WeightSyncClient(_Client):
    """Reads and deletes weight versions of a run."""

    def __init__(self, target: str, security: Security | None = None) -> None:
        super().__init__(target, security)
        self._stub = weightsync_pb2_grpc.WeightSyncServiceStub(self._channel)

    async def versions(self, run: str, *, page_size: int = 100) -> weightsync_pb2.ListVersionsResponse:
        """Return the newest committed versions and the replicas that reported."""
        request = weightsync_pb2.ListVersionsRequest(run=_run_name(run), page_size=page_size)
        return await _typed(self._stub.ListVersions(request))

    async def manifest(self, run: str, version: Version | None = None) -> weightsync_pb2.Manifest:
        """Describe a version, by default the newest."""
        number = None if version is None else version.to_proto()
        request = weightsync_pb2.GetManifestRequest(run=_run_name(run), version=number)
        return (await _typed(self._stub.GetManifest(request))).manifest

    async def delete(self, run: str, version: Version) -> None:
        """Delete a version that no live replica needs."""
        request = weightsync_pb2.DeleteVersionRequest(run=_run_name(run), version=version.to_proto())
        await _typed(self._stub.DeleteVersion(request))


def generate_request(
    prompt: Prompt, sampling: tokens_pb2.SamplingParams | None, n: int, run: str
) -> rollout_pb2.GenerateRequest:
    """Return the request for `n` samples of a prompt."""
    request = rollout_pb2.GenerateRequest(run=_run_name(run), sampling=sampling, n=n)
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, tokens_pb2.Conversation):
        request.conversation.CopyFrom(prompt)
    elif prompt and all(isinstance(item, int) for item in prompt):
        request.token_ids.ids.extend(cast("Sequence[int]", prompt))
    elif prompt and all(isinstance(item, Mapping) for item in prompt):
        messages = [tokens_pb2.ChatMessage(**item) for item in cast("Sequence[Mapping[str, Any]]", prompt)]
        request.conversation.messages.extend(messages)
    else:
        raise TypeError("the prompt is text, token ids, messages as mappings, or a Conversation; and it is not empty")
    return request


def _pieces(trajectory: tokens_pb2.Trajectory) -> Iterator[tokens_pb2.Trajectory]:
    """Yield a trajectory in pieces: merged in order they equal the trajectory. The first piece has all fields that are not repeated."""
    fields: dict[str, Any] = {field.name: value for field, value in trajectory.ListFields()}
    long = [field.name for field, _ in trajectory.ListFields() if field.is_repeated]
    yield tokens_pb2.Trajectory(**{name: value for name, value in fields.items() if name not in long})
    for name in long:
        values = fields[name]
        for begin in range(0, len(values), _PIECE_VALUES):
            piece = tokens_pb2.Trajectory()
            getattr(piece, name).extend(values[begin : begin + _PIECE_VALUES])
            yield piece


def _batch_parts(
    header: trainer_pb2.BatchHeader, trajectories: Iterable[tokens_pb2.Trajectory]
) -> Iterator[trainer_pb2.SubmitBatchRequest]:
    """Yield the header, then the trajectories in messages of `_PART_BYTES`. A trajectory that exceeds a message spans several."""
    yield trainer_pb2.SubmitBatchRequest(header=header)
    part = trainer_pb2.TrajectoryPart()
    size = 0
    for trajectory in trajectories:
        length = trajectory.ByteSize() + 16  # tag and length of the field, generously
        if part.trajectories and size + length > _PART_BYTES:
            yield trainer_pb2.SubmitBatchRequest(trajectories=part)
            part, size = trainer_pb2.TrajectoryPart(), 0
        if length > MAX_MESSAGE_BYTES:
            for place, piece in enumerate(_pieces(trajectory)):
                continued = trainer_pb2.TrajectoryPart(trajectories=[piece], continued=place > 0)
                yield trainer_pb2.SubmitBatchRequest(trajectories=continued)
            continue
        part.trajectories.append(trajectory)
        size += length
    if part.trajectories:
        yield trainer_pb2.SubmitBatchRequest(trajectories=part)
