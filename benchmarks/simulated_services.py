"""A rollout replica and a trainer that keep their contracts over gRPC and compute nothing: the load of `sluice bench orchestrator`.

Answers are put together from bytes that are made once per policy version, so that a simulated service costs less than the
orchestrator that it is to load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from sluice.client import TrainerClient
from sluice.rpc import SluiceError
from sluice.rpc.server import SERVER_OPTIONS
from sluice.v1 import rollout_pb2, tokens_pb2, trainer_pb2, trainer_pb2_grpc
from sluice.versions import BASE, Version, VersionSpan

COUNTS = "/bench.Counts/Get"
"""Method of a simulated service that answers with `Counting.to_json`."""

Handlers: TypeAlias = "dict[str, grpc.RpcMethodHandler[Any, Any]]"

TOKENIZER_DIGEST = "5" * 64
"""Digest of a tokenizer that nobody has."""

PROMPT = tuple(range(100, 132))
"""Token ids of every prompt."""

TURN = tuple(range(200, 216))
"""Token ids that messages of the environment add to a prompt."""

_CHARACTERS_PER_TOKEN = 4
_ENGINE_STEP_S = 0.02

_COALESCE_S, _COALESCE_TOKENS = 0.02, 64
"""Message period and size of a stream unless its request says otherwise."""

_ALIVE_S = 1.0
"""Seconds after which a stream without tokens says that its request is alive; more if its tokens are sent less often."""

_WATCH_AGAIN_S = 0.05
_COUNTS_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """How a simulated replica answers.

    Attributes:
        latency_s: Mean seconds of one request.
        spread: Largest deviation of a request from that mean, as a fraction of the mean, uniform on both sides.
        tokens: Tokens per sample.
    """

    latency_s: float
    spread: float
    tokens: int


class SimulatedReplica:
    """Answers every request after a while with n samples of the same length; `follow` keeps its version the trainer's."""

    def __init__(self, name: str, load: Load) -> None:
        self._name, self._load = name, load
        self._version = BASE
        self._changed = asyncio.Event()
        self._random = random.Random(name)  # noqa: S311 - a load, not a secret
        self._under_way = 0
        self._generated = 0

    async def follow(self, trainer: str, run: str) -> None:
        """Serve each version as soon as the trainer has made it."""
        async with TrainerClient(trainer) as client:
            while True:
                with contextlib.suppress(SluiceError):
                    state = await client.state(run)
                    self.serve(Version.from_proto(state.policy_version))
                    if self._version != BASE:
                        async for answer in client.watch_steps(run, self._version.number + 1):
                            self.serve(Version.from_proto(answer.step.policy_version))
                await asyncio.sleep(_WATCH_AGAIN_S)

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Return the handlers for a server. Bytes are sent as they are."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        rollout: Handlers = {
            "Generate": unary(self._generate, rollout_pb2.GenerateRequest.FromString),
            "GenerateStream": stream(self._generate_stream, rollout_pb2.GenerateStreamRequest.FromString),
            "GetModel": unary(self._model),
            "Tokenize": unary(self._tokenize, rollout_pb2.TokenizeRequest.FromString),
        }
        admin: Handlers = {
            "GetStatus": unary(self._status, rollout_pb2.GetStatusRequest.FromString),
            "SetWeightPolicy": unary(self._policy),
        }
        services = {"sluice.v1.RolloutService": rollout, "sluice.v1.RolloutAdminService": admin}
        return tuple(grpc.method_handlers_generic_handler(name, each) for name, each in services.items())

    async def _generate(self, request: rollout_pb2.GenerateRequest, _context: object) -> bytes:
        begun, tokens, n = self._version, self._tokens(request), request.n or 1
        self._under_way += n
        try:
            await asyncio.sleep(self._latency_s())
        finally:
            self._under_way -= n
        self._generated += n * tokens
        spans = _spans(begun, self._version, tokens)
        prompt = () if request.token_ids.ids else PROMPT
        head = rollout_pb2.GenerateResponse(
            request_id=request.request_id,
            prompt_token_ids=prompt or request.token_ids.ids,
            tokenizer_digest=TOKENIZER_DIGEST,
        )
        # Messages of one type that follow each other on the wire are merged.
        return head.SerializeToString() + _samples(n, tokens, spans)

    async def _generate_stream(
        self, request: rollout_pb2.GenerateStreamRequest, _context: object
    ) -> AsyncIterator[bytes]:
        wanted = request.request
        tokens, n = self._tokens(wanted), wanted.n or 1
        opening = rollout_pb2.StreamOpening(
            request_id=wanted.request_id,
            prompt_token_ids=wanted.token_ids.ids or PROMPT,
            tokenizer_digest=TOKENIZER_DIGEST,
        )
        yield rollout_pb2.GenerateStreamResponse(opening=opening).SerializeToString()
        latency_s = self._latency_s()
        every_s = request.coalesce.ToNanoseconds() / 1e9 if request.HasField("coalesce") else _COALESCE_S
        quiet_s = max(_ALIVE_S, every_s)
        at_once = request.coalesce_tokens if request.HasField("coalesce_tokens") else _COALESCE_TOKENS
        parts = messages_of_stream(latency_s, tokens, every_s, at_once)
        self._under_way += n
        try:
            for part in range(parts):
                left_s = latency_s / parts
                while left_s > 1.5 * quiet_s:  # a message that is due soon is a sign, too
                    await asyncio.sleep(quiet_s)
                    left_s -= quiet_s
                    yield self._progress()
                await asyncio.sleep(left_s)
                first, end = part * tokens // parts, (part + 1) * tokens // parts
                self._generated += n * (end - first)
                yield _chunk(n, first, end, tokens, self._version) + self._progress()
        finally:
            self._under_way -= n

    def _progress(self) -> bytes:
        """Return the rest of a response's chunk, to be merged with its deltas."""
        steps = int(asyncio.get_running_loop().time() / _ENGINE_STEP_S)
        chunk = rollout_pb2.StreamChunk(stage=rollout_pb2.REQUEST_STAGE_RUNNING, engine_steps=steps)
        return rollout_pb2.GenerateStreamResponse(chunk=chunk).SerializeToString()

    async def _model(self, _request: bytes, _context: object) -> bytes:
        return rollout_pb2.GetModelResponse(
            model="simulated",
            vocabulary_size=1 << 15,
            max_model_len=1 << 15,
            dtype="bfloat16",
            tokenizer_digest=TOKENIZER_DIGEST,
            engine="simulated",
            policy_version=self._version.to_proto(),
        ).SerializeToString()

    async def _tokenize(self, request: rollout_pb2.TokenizeRequest, _context: object) -> bytes:
        ids = [*request.continues.ids, *TURN] if request.continues.ids else PROMPT
        return rollout_pb2.TokenizeResponse(token_ids=ids, tokenizer_digest=TOKENIZER_DIGEST).SerializeToString()

    def serve(self, version: Version) -> None:
        """Serve a version from now on, if it is newer."""
        if version > self._version:
            self._version = version
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _status(self, request: rollout_pb2.GetStatusRequest, _context: object) -> bytes:
        awaited = Version.from_proto(request.awaited_version) if request.HasField("awaited_version") else BASE
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.wait.ToTimedelta().total_seconds()):
                while self._version < awaited:
                    await self._changed.wait()
        return rollout_pb2.GetStatusResponse(
            replica=self._name,
            state=rollout_pb2.REPLICA_STATE_SERVING,
            policy_version=self._version.to_proto(),
            running=self._under_way,
            max_running=1 << 20,
            generated_tokens=self._generated,
            engine_steps=int(asyncio.get_running_loop().time() / _ENGINE_STEP_S),
        ).SerializeToString()

    async def _policy(self, _request: bytes, _context: object) -> bytes:
        return rollout_pb2.SetWeightPolicyResponse(policy_version=self._version.to_proto()).SerializeToString()

    def _latency_s(self) -> float:
        return self._load.latency_s * (1 + self._load.spread * self._random.uniform(-1, 1))

    def _tokens(self, request: rollout_pb2.GenerateRequest) -> int:
        return min(self._load.tokens, request.sampling.max_tokens or self._load.tokens)


def messages_of_stream(latency_s: float, tokens: int, every_s: float, at_once: int = _COALESCE_TOKENS) -> int:
    """Return how many messages carry the tokens of a request: one per period, or one whenever a sample has `at_once` new tokens.

    Args:
        latency_s: Seconds of the request.
        tokens: Tokens of each sample.
        every_s: Seconds of tokens in one message.
        at_once: Tokens of a sample in one message.
    """
    by_time = int(latency_s / max(every_s, _ENGINE_STEP_S))
    return max(1, min(tokens, max(by_time, -(-tokens // at_once))))


def _spans(begun: Version, ended: Version, tokens: int) -> tuple[VersionSpan, ...]:
    """Return the versions of a sample's tokens. If there was an update meanwhile, it comes in the middle."""
    if begun == ended:
        return (VersionSpan(0, begun),)
    return VersionSpan(0, begun), VersionSpan(tokens // 2, ended)


def _sample(
    index: int, first: int, end: int, tokens: int, spans: tuple[VersionSpan, ...]
) -> rollout_pb2.GeneratedSample:
    """Return the tokens `first` to `end` of one sample; the share of lower-case letters in its text is its own."""
    places = range(first, end)
    text = "".join(
        ("word"[: _CHARACTERS_PER_TOKEN - 1] if (place + index) % 17 < index else "WOR") + " " for place in places
    )
    reason = tokens_pb2.FINISH_REASON_STOP if end == tokens else tokens_pb2.FINISH_REASON_UNSPECIFIED
    return rollout_pb2.GeneratedSample(
        index=index,
        token_ids=[1000 + (place * 31 + index * 7) % 20000 for place in places],
        logprobs=[-0.01 * (1 + (place + index) % 90) for place in places],
        version_spans=[span.to_proto() for span in spans],
        finish_reason=reason,
        text=text,
    )


@lru_cache(maxsize=1024)
def _samples(n: int, tokens: int, spans: tuple[VersionSpan, ...]) -> bytes:
    samples = [_sample(index, 0, tokens, tokens, spans) for index in range(n)]
    return rollout_pb2.GenerateResponse(samples=samples).SerializeToString()


@lru_cache(maxsize=4096)
def _chunk(n: int, first: int, end: int, tokens: int, version: Version) -> bytes:
    """Return the tokens `first` to `end` of all samples of a request."""
    spans = (VersionSpan(first, version),)
    deltas = [
        rollout_pb2.SampleDelta(tokens=_sample(index, first, end, tokens, spans), offset=first) for index in range(n)
    ]
    return rollout_pb2.GenerateStreamResponse(chunk=rollout_pb2.StreamChunk(deltas=deltas)).SerializeToString()


def counted(
    translate: Callable[[Any], Any] | None, name: str, messages: Counter[str], sizes: Counter[str]
) -> Callable[[Any], Any]:
    """Return a translation between messages and bytes that also counts messages and bytes under `name`."""

    def count(message: Any) -> Any:  # noqa: ANN401 - bytes or a message
        translated = message if translate is None else translate(message)
        messages[name] += 1
        sizes[name] += len(message if isinstance(message, bytes) else translated)
        return translated

    return count


class Counting(grpc.aio.ServerInterceptor):
    """Counts the messages of a server and their bytes, by method, without what gRPC and TCP add.

    Attributes:
        notes: Returns further content of the answer to `COUNTS`.
    """

    def __init__(self) -> None:
        self._messages: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._counted: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self.notes: Callable[[], Mapping[str, Any]] = dict

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Make a method count its requests and responses."""
        method = handler_call_details.method
        if method == COUNTS:
            return grpc.unary_unary_rpc_method_handler(self._answer)
        if method not in self._counted:
            handler: Any = await continuation(handler_call_details)
            if handler is None:
                return None
            name = method.rpartition("/")[2]
            self._counted[method] = handler._replace(
                request_deserializer=self._counting(name, handler.request_deserializer),
                response_serializer=self._counting(name, handler.response_serializer),
            )
        return self._counted[method]

    def _counting(self, name: str, translate: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        return counted(translate, name, self._messages, self._bytes)

    async def _answer(self, _request: bytes, _context: object) -> bytes:
        return json.dumps({"messages": self._messages, "bytes": self._bytes, "notes": self.notes()}).encode()


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a server.

    Attributes:
        notes: Further content of its answer.
    """

    messages: Mapping[str, int]
    sizes: Mapping[str, int]
    notes: Mapping[str, Any]

    def since(self, before: Counts) -> Counts:
        """Return the difference since `before`."""
        return Counts(
            {name: count - before.messages.get(name, 0) for name, count in self.messages.items()},
            {name: count - before.sizes.get(name, 0) for name, count in self.sizes.items()},
            self.notes,
        )


async def read_counts(target: str) -> Counts:
    """Ask a simulated service for its counts."""
    async with grpc.aio.insecure_channel(target) as channel:
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(COUNTS)
        told = json.loads(await ask(b"", timeout=_COUNTS_S))
    return Counts(told["messages"], told["bytes"], told["notes"])


async def read_batch(
    parts: AsyncIterator[trainer_pb2.SubmitBatchRequest],
) -> tuple[trainer_pb2.BatchHeader, list[trainer_pb2.TrajectoryResult]]:
    """Return the header of a batch, and a result "trained" for each of its trajectories."""
    header, results = trainer_pb2.BatchHeader(), []
    async for part in parts:
        if part.HasField("header"):
            header = part.header
        results += [
            trainer_pb2.TrajectoryResult(
                trajectory_id=each.trajectory_id,
                outcome=tokens_pb2.TRAJECTORY_OUTCOME_TRAINED,
                trained_tokens=len(each.logprobs),
            )
            for each in part.trajectories.trajectories
        ]
    return header, results


class SimulatedTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Applies every batch at once; names of its methods are gRPC's."""

    def __init__(self) -> None:
        self._version = BASE
        self._checkpoint = trainer_pb2.Checkpoint(name="step_0", policy_version=BASE.to_proto())
        self._reports: dict[int, trainer_pb2.StepReport] = {}
        self._changed = asyncio.Event()

    async def BeginEpoch(  # noqa: N802
        self, request: trainer_pb2.BeginEpochRequest, _context: object
    ) -> trainer_pb2.BeginEpochResponse:
        """Begin from the base model."""
        self._version = Version(request.epoch, 0)
        self._reports.clear()
        return trainer_pb2.BeginEpochResponse(
            policy_version=self._version.to_proto(), restored_version=BASE.to_proto(), next_sequence_no=1
        )

    async def SubmitBatch(  # noqa: N802
        self, request_iterator: AsyncIterator[trainer_pb2.SubmitBatchRequest], _context: object
    ) -> trainer_pb2.SubmitBatchResponse:
        """Report every trajectory as trained."""
        header, results = await read_batch(request_iterator)
        self.report(header, results)
        return trainer_pb2.SubmitBatchResponse(batch_id=header.batch_id, queued_batches=0)

    def report(self, header: trainer_pb2.BatchHeader, results: list[trainer_pb2.TrajectoryResult]) -> None:
        """Report a batch as applied."""
        self._version = Version(header.target_version.epoch, header.sequence_no)
        self._reports[header.sequence_no] = trainer_pb2.StepReport(
            policy_version=self._version.to_proto(),
            batch_id=header.batch_id,
            sequence_no=header.sequence_no,
            metrics={"loss": 0.0},
            results=results,
        )
        self._reports.pop(header.sequence_no - 1024, None)
        self._changed.set()
        self._changed = asyncio.Event()

    async def GetTrainerState(  # noqa: N802
        self, _request: trainer_pb2.GetTrainerStateRequest, _context: object
    ) -> trainer_pb2.GetTrainerStateResponse:
        """Wait for a batch."""
        return trainer_pb2.GetTrainerStateResponse(
            phase=trainer_pb2.TRAINER_PHASE_WAITING if self._version.epoch else trainer_pb2.TRAINER_PHASE_READY,
            policy_version=self._version.to_proto(),
            published_version=self._version.to_proto(),
            next_sequence_no=self._version.number + 1,
            tokenizer_digest=TOKENIZER_DIGEST,
            newest_checkpoint=self._checkpoint,
            oldest_reported_number=min(self._reports, default=self._version.number + 1),
        )

    async def WatchSteps(  # noqa: N802
        self, request: trainer_pb2.WatchStepsRequest, _context: object
    ) -> AsyncIterator[trainer_pb2.WatchStepsResponse]:
        """Report the steps."""
        number = request.from_number or min(self._reports, default=1)
        while True:
            changed = self._changed
            while number in self._reports:
                yield trainer_pb2.WatchStepsResponse(step=self._reports[number])
                number += 1
            await changed.wait()

    async def SaveCheckpoint(  # noqa: N802
        self, request: trainer_pb2.SaveCheckpointRequest, _context: object
    ) -> trainer_pb2.SaveCheckpointResponse:
        """Name a checkpoint."""
        self._checkpoint = trainer_pb2.Checkpoint(
            name=f"step_{self._version.number}",
            policy_version=self._version.to_proto(),
            journal_position=request.journal_position,
        )
        return trainer_pb2.SaveCheckpointResponse(checkpoint=self._checkpoint)

    async def KeepCheckpoint(  # noqa: N802
        self, _request: trainer_pb2.KeepCheckpointRequest, _context: object
    ) -> trainer_pb2.KeepCheckpointResponse:
        """Do nothing: there is only one."""
        return trainer_pb2.KeepCheckpointResponse()

    async def ListCheckpoints(  # noqa: N802
        self, _request: trainer_pb2.ListCheckpointsRequest, _context: object
    ) -> trainer_pb2.ListCheckpointsResponse:
        """Name the newest."""
        return trainer_pb2.ListCheckpointsResponse(checkpoints=[self._checkpoint])


@contextlib.asynccontextmanager
async def serving(
    addresses: Sequence[str], register: Callable[[grpc.aio.Server], object], counting: Counting
) -> AsyncIterator[None]:
    """Serve at these addresses while the block runs."""
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(counting,))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # waiting peers ask it
    register(server)
    for address in addresses:
        server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


async def until_signal(*beside: Any) -> None:  # noqa: ANN401 - coroutines
    """Run the coroutines `beside` until SIGTERM or SIGINT."""
    tasks = [asyncio.ensure_future(each) for each in beside]
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    for task in tasks:
        task.cancel()


async def serve_until_signal(
    addresses: Sequence[str],
    register: Callable[[grpc.aio.Server], object],
    counting: Counting,
    *beside: Any,  # noqa: ANN401
) -> None:
    """Serve at these addresses, and run the coroutines `beside`, until SIGTERM or SIGINT."""
    async with serving(addresses, register, counting):
        await until_signal(*beside)


def main() -> None:
    """Serve a simulated replica or trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("service", choices=("replica", "trainer"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--run", default="bench", help="name of the run")
    parser.add_argument("--trainer", default="", help="address of the trainer that a replica follows")
    parser.add_argument("--latency-s", type=float, default=1.0, help="mean seconds of one request")
    parser.add_argument("--spread", type=float, default=0.3, help="share of it by which requests differ")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per sample")
    options = parser.parse_args()
    address, counting = f"127.0.0.1:{options.port}", Counting()
    if options.service == "trainer":
        trainer = SimulatedTrainer()

        def register(server: grpc.aio.Server) -> None:
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server)

        asyncio.run(serve_until_signal([address], register, counting))
        return
    replica = SimulatedReplica(f"replica-{options.port}", Load(options.latency_s, options.spread, options.tokens))
    following = replica.follow(options.trainer, options.run)
    asyncio.run(
        serve_until_signal(
            [address], lambda server: server.add_generic_rpc_handlers(replica.handlers()), counting, following
        )
    )


if __name__ == "__main__":
    main()
