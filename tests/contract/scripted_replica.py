# ruff: noqa: N802 - gRPC names the methods
"""A replica that streams over real gRPC without a model, and fails as a test says; and a cable to it that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.timestamp_pb2 import Timestamp
from orchestrator_doubles import serve_rollout
from simulated_clock import SimulatedClock

from sluice.clock import CLOCK, Clock
from sluice.rpc import SluiceError
from sluice.sampling.pool import ReplicaPool
from sluice.sampling.replica import Replica
from sluice.v1 import rollout_pb2, rollout_pb2_grpc, tokens_pb2
from sluice.versions import Version

PROMPT = [11, 12, 13]
QUEUED, RUNNING = rollout_pb2.REQUEST_STAGE_QUEUED, rollout_pb2.REQUEST_STAGE_RUNNING
PAUSED, SWITCHING = rollout_pb2.REQUEST_STAGE_PAUSED, rollout_pb2.REQUEST_STAGE_SWITCHING
ABORT, LENGTH = tokens_pb2.FINISH_REASON_ABORT, tokens_pb2.FINISH_REASON_LENGTH

STEP_S = 0.25
"""Simulated seconds that pass at a time: as many as between two ticks of a pool."""

Result = TypeVar("Result")


def sampled(first: int, count: int) -> list[int]:
    """The tokens of a sample: all follow from the first one."""
    ids = [first]
    while len(ids) < count:
        ids.append(33 + (ids[-1] * 7 + len(ids)) % 90)
    return ids


@dataclass
class ScriptedReplica(rollout_pb2_grpc.RolloutServiceServicer, rollout_pb2_grpc.RolloutAdminServiceServicer):
    """Samples `per_message` tokens of each sample, then sends a message, every `pace_s` seconds.

    Sample i of a request with seed s begins with the token of s + i; what follows is a function of the tokens before.

    Attributes:
        stalls_after: Messages with tokens of a request after which the engine makes no more steps; signs of life go on.
        silent_after: Messages after which a stream sends nothing any more.
        aborts_after: Messages after which a request ends with ABORT.
        damaged_after: Messages after which the offsets are wrong.
        prefill_s: Seconds of the first step of each request, in which signs of life are all that is sent.
        paused: Whether sampling is paused.
        switching: Whether the engine switches to other weights.
        clock: The time that `pace_s` and `prefill_s` are measured by.
        open: Requests that are answered now; `most_open` were at a time, and `resting` wait for the next message to be due.
    """

    name: str
    version: Version = field(default_factory=lambda: Version(1, 0))
    digest: str = "same"
    state: int = rollout_pb2.REPLICA_STATE_SERVING
    start_s: int = 1
    per_message: int = 3
    pace_s: float = 0.02
    max_running: int = 64
    stalls_after: int | None = None
    silent_after: int | None = None
    aborts_after: int | None = None
    damaged_after: int | None = None
    prefill_s: float = 0.0
    paused: bool = False
    switching: bool = False
    clock: Clock = CLOCK
    steps: int = 1
    open: int = 0
    resting: int = 0
    most_open: int = 0
    models_asked: int = 0
    requests: list[rollout_pb2.GenerateRequest] = field(default_factory=list)

    async def GenerateStream(self, request, context):
        self.requests.append(request.request)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            async for message in self._stream(request.request):
                yield message
        finally:
            self.open -= 1

    async def _stream(self, wanted):
        if self.state == rollout_pb2.REPLICA_STATE_DRAINING:
            raise SluiceError.unavailable("DRAINING", "this replica is shutting down; use another one")
        if wanted.HasField("continues") and (not wanted.HasField("conversation") or wanted.HasField("rendered")):
            raise SluiceError.invalid_argument("continues", "goes with a conversation alone")
        prompt = list(wanted.rendered.ids or wanted.token_ids.ids) or PROMPT
        continued = wanted.HasField("continues")
        opening = {"prompt_token_ids": prompt, "tokenizer_digest": self.digest, "continued": continued}
        yield rollout_pb2.GenerateStreamResponse(opening=opening)
        begun = prompt[len(prompt) - wanted.continued_tokens :]
        firsts = [begun[0] if begun else 33 + (wanted.sampling.seed + index) % 90 for index in range(wanted.n or 1)]
        done, most, number = 0, wanted.sampling.max_tokens, 0
        computed_at = self.clock() + self.prefill_s
        while done < most:
            await self._rest(self.clock.sleep(self.pace_s))
            if self.clock() < computed_at:
                yield rollout_pb2.GenerateStreamResponse(chunk={"stage": RUNNING, "engine_steps": self.steps})
                continue
            number += 1
            stalled = self.stalls_after is not None and number > self.stalls_after
            stage = SWITCHING if self.switching else PAUSED if self.paused else RUNNING
            chunk = rollout_pb2.StreamChunk(stage=stage, engine_steps=self.steps)
            if self.silent_after is not None and number > self.silent_after:
                await self._rest(asyncio.Event().wait())
            if stage == RUNNING and not stalled:
                self.steps += 1
                chunk.engine_steps = self.steps
                ids = range(done, min(done + self.per_message, most))
                done = ids.stop
                aborted = self.aborts_after is not None and number >= self.aborts_after
                for index, first in enumerate(firsts):
                    more = sampled(first, len(begun) + done)[len(begun) + ids.start :]
                    damaged = self.damaged_after is not None and number > self.damaged_after
                    self._add(chunk, index, ids.start + damaged, more)
                    tokens = chunk.deltas[-1].tokens
                    tokens.finish_reason = ABORT if aborted and done < most else LENGTH if done == most else 0
                    text = "".join(map(chr, [*begun, *more] if ids.start == 0 else more))
                    self._tell(wanted, chunk.deltas[-1], text, "".join(map(chr, sampled(first, len(begun) + done))))
                done = most if aborted else done
            yield rollout_pb2.GenerateStreamResponse(chunk=chunk)

    def _tell(self, wanted, delta, text: str, whole: str) -> None:
        if wanted.return_text:
            delta.tokens.text = text
        if not wanted.return_message:
            return
        delta.content = text
        if delta.tokens.finish_reason:
            calls = [{"name": each.name} for each in wanted.conversation.tools]
            delta.tokens.message.CopyFrom(tokens_pb2.ChatMessage(content=whole, tool_calls=calls))

    async def _rest(self, wait: Awaitable[object]) -> None:
        self.resting += 1
        try:
            await wait
        finally:
            self.resting -= 1

    def _add(self, chunk, index: int, offset: int, ids: list[int]) -> None:
        span = tokens_pb2.VersionSpan(start=offset, policy_version=self.version.to_proto())
        tokens = rollout_pb2.GeneratedSample(
            index=index, token_ids=ids, logprobs=[-each / 64 for each in ids], version_spans=[span]
        )
        chunk.deltas.add(tokens=tokens, offset=offset)

    async def Tokenize(self, request, context):
        return rollout_pb2.TokenizeResponse(token_ids=[*request.continues.ids, 65, 66], tokenizer_digest=self.digest)

    async def GetModel(self, request, context):
        self.models_asked += 1
        return rollout_pb2.GetModelResponse(model="double", tokenizer_digest=self.digest, dtype="bfloat16")

    async def GetStatus(self, request, context):
        return rollout_pb2.GetStatusResponse(
            replica=self.name,
            state=rollout_pb2.REPLICA_STATE_SWITCHING
            if self.switching
            else rollout_pb2.REPLICA_STATE_PAUSED
            if self.paused
            else self.state,
            policy_version=self.version.to_proto(),
            running=self.open,
            max_running=self.max_running,
            engine_steps=self.steps,
            start_time=Timestamp(seconds=self.start_s),
        )


class Cable:
    """Forwards bytes to a server until it is frozen (nothing arrives any more) or cut (connections break and are refused)."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def plug_in(self) -> None:
        """Take connections, at the same port as before."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def is_frozen(self) -> bool:
        """Whether bytes are held back."""
        return not self._flows.is_set()

    @property
    def is_cut(self) -> bool:
        """Whether connections are refused."""
        return self._server is None or not self._server.is_serving()

    def freeze(self) -> None:
        """Hold all bytes back, as a stopped process or a cut network does."""
        self._flows.clear()

    def thaw(self) -> None:
        """Let the bytes through that were held back, and all that follow."""
        self._flows.set()

    async def cut(self) -> None:
        """Break all connections, and refuse new ones."""
        if self._server is not None:
            self._server.close()
        self.jolt()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def jolt(self) -> None:
        """Break all connections; new ones may be made, as with a process that is started again at once."""
        for writer in self._writers:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(self._host, self._port)
            self._writers |= {writer, back}
            self._tasks |= {
                asyncio.create_task(self._carry(reader, back)),
                asyncio.create_task(self._carry(there, writer)),
            }

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def connected(replica: ScriptedReplica) -> AsyncIterator[tuple[str, Cable]]:
    """Serve a replica behind a cable; gives the address of the cable."""
    async with serve_rollout(replica) as target:
        cable = Cable(target)
        await cable.plug_in()
        try:
            yield f"127.0.0.1:{cable.port}", cable
        finally:
            cable.thaw()
            await cable.cut()


class Timeline:
    """Lets simulated time pass for a pool and the replicas behind cables: what they send at one time arrives before the next.

    Args:
        clock: The clock of the pool. The replicas get it, too.
        pool: Knows the replicas.
        replicas: The replicas and their cables.
    """

    def __init__(
        self, clock: SimulatedClock, pool: ReplicaPool, replicas: Sequence[tuple[ScriptedReplica, Cable]]
    ) -> None:
        self.clock, self._pool, self._replicas = clock, pool, replicas
        for replica, _ in replicas:
            replica.clock = clock

    async def until(self, condition: Callable[[], object]) -> None:
        """Let time pass until a condition holds; the caller has a deadline."""
        while not condition():
            await self.clock.advance(STEP_S)
            await until(self._all_arrived)

    async def result(self, task: asyncio.Task[Result]) -> Result:
        """Let time pass until a task is done, and return its result."""
        await self.until(task.done)
        return await task

    async def wait(self, seconds: float) -> None:
        """Let some time pass."""
        end = self.clock() + seconds
        await self.until(lambda: self.clock() >= end)

    def _all_arrived(self) -> bool:
        known = {each.target.rpartition(":")[2]: each for each in self._pool.replicas if each.seen}
        return all(
            self._arrived(replica, cable, known[str(cable.port)])
            for replica, cable in self._replicas
            if not cable.is_frozen and str(cable.port) in known
        )

    def _arrived(self, replica: ScriptedReplica, cable: Cable, known: Replica) -> bool:
        """Return whether the pool has all that a replica has sent, and the replica all that the pool has asked for."""
        if known.loss is None and self._pool.now - known.progress.heard_at > self._pool.config.poll_s:
            return False
        if cable.is_cut:
            return True
        streams = [work.progress for work in known.works if work.progress is not None]
        if not len(streams) == replica.open == replica.resting:
            return False
        silent = replica.silent_after is not None
        return silent or all(self._pool.now - each.heard_at <= replica.pace_s for each in streams)


async def until(condition: Callable[[], object]) -> None:
    """Wait for a state that messages over gRPC bring about; the caller has a deadline."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
