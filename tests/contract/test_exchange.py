# ruff: noqa: N802 - gRPC names the methods
"""Calls of a gateway on one stream: both sides of SessionService.Exchange over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

import grpc
import pytest
from google.rpc.status_pb2 import Status
from held_ports import held_ports
from simulated_clock import SimulatedClock
from structlog.testing import capture_logs

from gateway_svc.orchestrator import OLD_S, Exchange
from orchestrator_svc.sessions import exchange as served
from sluice.clock import CLOCK, Clock
from sluice.config import SecurityConfig, ServerConfig
from sluice.rpc import MAX_MESSAGE_BYTES, RpcServer, SluiceError, connect
from sluice.rpc.parts import split
from sluice.v1 import session_pb2, session_pb2_grpc

DEADLINE_S = 60.0


class Orchestrator(session_pb2_grpc.SessionServiceServicer):
    """Begins what `let` allows, records everything."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self.clock = clock
        self.let, self.began, self.streams = asyncio.Event(), asyncio.Event(), 0
        self.callers: list[str] = []
        self.most_bytes = 64 << 20
        self.recorded: dict[str, session_pb2.RecordedGeneration] = {}

    async def Exchange(self, requests, context):
        self.streams += 1
        await served.answer_exchange(
            requests, context.write, self._begin, self._record, self._get, most_bytes=self.most_bytes, clock=self.clock
        )

    async def _begin(self, principal, request, most_s):
        self.callers.append(principal)
        self.began.set()
        await self.let.wait()
        if request.request_id in self.recorded:
            return session_pb2.BeginGenerationResponse(recorded=self.recorded[request.request_id])
        return session_pb2.BeginGenerationResponse(running=f"{request.request_id} {most_s:g}")

    async def _record(self, principal, request):
        self.callers.append(principal)
        if request.episode_id == "full":
            raise SluiceError.resource_exhausted("SESSION_FULL", "no room", 1.5)
        if request.episode_id == "broken":
            raise ValueError("nobody foresaw it")
        self.recorded[request.generation.request_id] = request.generation
        return session_pb2.RecordGenerationResponse(parent=request.episode_id)

    async def _get(self, principal, request):
        return session_pb2.GetGenerationResponse(generation=self.recorded[request.generation_id])


@contextlib.asynccontextmanager
async def serving(orchestrator, port=0):
    server = RpcServer("orchestrator", ServerConfig(port=port), SecurityConfig())
    server.add(session_pb2_grpc.add_SessionServiceServicer_to_server, orchestrator, "sluice.v1.SessionService")
    port = await server.start()
    try:
        yield server, port
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def calling(port, clock=CLOCK):
    async with connect(f"127.0.0.1:{port}", SecurityConfig(), role="gateway") as channel:
        exchange = Exchange(session_pb2_grpc.SessionServiceStub(channel), clock)
        try:
            yield exchange
        finally:
            await exchange.close()


@pytest.fixture
async def orchestrator():
    return Orchestrator()


@pytest.fixture
def port():
    """The port of a server that is started again."""
    with held_ports(1) as (port,):
        yield port


@pytest.fixture
async def exchange(orchestrator):
    async with serving(orchestrator) as (_, port), calling(port) as calls:
        yield calls


def record(episode: str) -> session_pb2.RecordGenerationRequest:
    return session_pb2.RecordGenerationRequest(episode_id=episode)


async def test_a_call_that_waits_holds_up_no_other_one(exchange, orchestrator) -> None:
    waiting = asyncio.create_task(
        exchange.begin(session_pb2.BeginGenerationRequest(request_id="one"), "ann", DEADLINE_S)
    )
    answers = await asyncio.gather(*(exchange.record(record(f"e{i}"), "bob", DEADLINE_S) for i in range(200)))
    assert [each.parent for each in answers] == [f"e{i}" for i in range(200)]
    assert not waiting.done()
    orchestrator.let.set()
    assert (await waiting).running == "one 30", "it may wait for half of its time"
    assert orchestrator.streams == 1
    assert set(orchestrator.callers) == {"ann", "bob"}


async def test_an_error_is_that_of_its_call_alone(exchange) -> None:
    with pytest.raises(SluiceError) as full:
        await exchange.record(record("full"), "ann", DEADLINE_S)
    assert (full.value.code, full.value.reason, full.value.retry_after_s) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "SESSION_FULL",
        1.5,
    )
    with pytest.raises(SluiceError) as broken:
        await exchange.record(record("broken"), "ann", DEADLINE_S)
    assert (broken.value.code, broken.value.reason) == (grpc.StatusCode.INTERNAL, "UNEXPECTED")
    assert "foresaw" not in broken.value.message, "the log has what went wrong, the caller has not"
    assert (await exchange.record(record("well"), "ann", DEADLINE_S)).parent == "well"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "request"),
        ({"record": record("e")}, "on_behalf_of"),
        ({"record": record("e"), "on_behalf_of": "ann"}, "timeout"),
        ({"record": record("e"), "on_behalf_of": "ann", "timeout": {"seconds": -1}}, "timeout"),
    ],
)
async def test_a_malformed_call_is_refused_and_the_stream_goes_on(orchestrator, fields, field) -> None:
    async with serving(orchestrator) as (_, port), connect(f"127.0.0.1:{port}", SecurityConfig()) as channel:
        stream = session_pb2_grpc.SessionServiceStub(channel).Exchange(timeout=DEADLINE_S)
        await stream.write(session_pb2.ExchangeRequest(call=7, **fields))
        answer = await stream.read()
        assert answer.call == 7
        error = SluiceError.from_status(Status.FromString(answer.error))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert field in error.violations
        sound = session_pb2.ExchangeRequest(call=8, record=record("e"), on_behalf_of="ann", timeout={"seconds": 1})
        await stream.write(sound)
        assert (await stream.read()).recorded.parent == "e"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF, "a stream that its client ends is ended"


async def test_an_old_stream_ends_after_its_calls_and_the_next_call_begins_another(exchange, orchestrator) -> None:
    clock = orchestrator.clock = SimulatedClock()
    waiting = asyncio.create_task(exchange.begin(session_pb2.BeginGenerationRequest(), "ann", DEADLINE_S))
    await orchestrator.began.wait()
    await clock.advance(served.STREAM_S - 1)
    assert clock.waits == 1, "the stream takes calls until it is old"
    await clock.advance(1)
    assert clock.waits == 0
    assert not waiting.done(), "the stream takes no new calls, and waits for the one that it has"
    orchestrator.let.set()
    assert (await waiting).running
    assert (await again(lambda: exchange.record(record("e"), "ann", DEADLINE_S))).parent == "e"
    assert orchestrator.streams == 2


async def test_calls_fail_at_once_when_the_server_drains_and_work_when_it_is_back(orchestrator, port) -> None:
    async with serving(orchestrator, port) as (server, _), calling(port) as exchange:
        waiting = asyncio.create_task(exchange.begin(session_pb2.BeginGenerationRequest(), "ann", DEADLINE_S))
        await orchestrator.began.wait()
        await server.stop(DEADLINE_S)
        with pytest.raises(SluiceError) as ended:
            await waiting
        assert ended.value.code is grpc.StatusCode.UNAVAILABLE
        async with serving(orchestrator, port):
            assert (await again(lambda: exchange.record(record("e"), "ann", DEADLINE_S))).parent == "e"


async def test_a_call_ends_by_its_deadline(orchestrator) -> None:
    clock = SimulatedClock()
    async with serving(orchestrator) as (_, port), calling(port, clock) as exchange:
        waiting = asyncio.create_task(exchange.begin(session_pb2.BeginGenerationRequest(), "ann", DEADLINE_S))
        await orchestrator.began.wait()
        await clock.advance(DEADLINE_S - 1)
        assert not waiting.done()
        await clock.advance(1)
        with pytest.raises(SluiceError) as late:
            await waiting
        assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await exchange.record(record("e"), "ann", DEADLINE_S)).parent == "e"


async def test_a_caller_that_leaves_does_not_end_the_stream(exchange, orchestrator) -> None:
    leaving = asyncio.create_task(exchange.begin(session_pb2.BeginGenerationRequest(), "ann", DEADLINE_S))
    await orchestrator.began.wait()
    leaving.cancel()
    await asyncio.wait({leaving})
    orchestrator.let.set()
    assert (await exchange.record(record("e"), "ann", DEADLINE_S)).parent == "e"
    assert orchestrator.streams == 1


MIB = 1 << 20


def large(name: str, mebibytes: int = 6) -> session_pb2.RecordGenerationRequest:
    """A recording of so many MiB, and a bit."""
    made = session_pb2.RecordedGeneration(request_id=name, dialect="x" * (mebibytes * MIB))
    return session_pb2.RecordGenerationRequest(episode_id=f"e{name}", generation=made)


async def test_what_is_larger_than_a_message_travels_in_parts_in_both_directions(exchange, orchestrator) -> None:
    orchestrator.let.set()
    recording = [asyncio.create_task(exchange.record(large(name), "ann", DEADLINE_S)) for name in "ab"]
    small = await exchange.record(record("e"), "bob", DEADLINE_S)
    assert small.parent == "e"
    assert [each.parent for each in await asyncio.gather(*recording)] == ["ea", "eb"]
    begin = session_pb2.BeginGenerationRequest(request_id="a")
    assert (await exchange.begin(begin, "ann", DEADLINE_S)).recorded == large("a").generation
    get = session_pb2.GetGenerationRequest(generation_id="b")
    assert (await exchange.get(get, "ann", DEADLINE_S)).generation == large("b").generation
    assert orchestrator.streams == 1


async def test_a_call_that_is_larger_than_a_session_may_be_is_refused_at_its_first_part(exchange, orchestrator) -> None:
    orchestrator.most_bytes = 6 * MIB
    with pytest.raises(SluiceError, match=r"orchestrator\.external\.session_mb") as full:
        await exchange.record(large("a", 40), "ann", DEADLINE_S)
    assert (full.value.code, full.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SESSION_FULL")
    assert (await exchange.record(large("b", 6), "ann", DEADLINE_S)).parent == "eb"
    assert orchestrator.streams == 1


@contextlib.asynccontextmanager
async def raw_stream(orchestrator):
    """A stream of calls as a program in any language may write it."""
    async with serving(orchestrator) as (_, port), connect(f"127.0.0.1:{port}", SecurityConfig()) as channel:
        yield session_pb2_grpc.SessionServiceStub(channel).Exchange(timeout=DEADLINE_S)


def in_parts(call: int, request: session_pb2.RecordGenerationRequest, seconds: int = 9):
    """The messages of one call."""
    whole = session_pb2.ExchangeRequest(call=call, record=request, on_behalf_of="ann", timeout={"seconds": seconds})
    return [
        session_pb2.ExchangeRequest(call=call, part=part, timeout={"seconds": seconds})
        for part in split(whole.SerializeToString())
    ]


async def refusal(stream, call: int) -> SluiceError:
    answer = await stream.read()
    assert answer.call == call
    return SluiceError.from_status(Status.FromString(answer.error))


async def test_parts_of_a_call_without_an_end_are_held_until_its_time_is_over_and_no_longer(orchestrator) -> None:
    orchestrator.clock, orchestrator.most_bytes = SimulatedClock(), 8 * MIB
    async with raw_stream(orchestrator) as stream:
        first, *_ = in_parts(1, large("a"))
        await stream.write(first)
        await stream.write(in_parts(2, large("b"))[0])
        full = await refusal(stream, 2)
        assert (full.code, full.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_RPCS")
        assert full.retry_after_s > 0
        await orchestrator.clock.advance(9.0)
        for message in in_parts(3, large("c")):
            await stream.write(message)
        assert (await stream.read()).recorded.parent == "ec"
        for message in in_parts(4, large("d")):
            await stream.write(message)
        assert (await stream.read()).recorded.parent == "ed", "a call that was answered takes no room"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
    assert orchestrator.clock.waits == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"digest": bytes(16)}, "DATA_LOSS"),
        ({"digest": b"short"}, "INVALID_ARGUMENT"),
        ({"total_bytes": 7}, "INVALID_ARGUMENT"),
        ({"total_bytes": MIB + 1}, "INVALID_ARGUMENT"),
        ({"content": b""}, "INVALID_ARGUMENT"),
        ({"content": bytes(MIB + 1)}, "INVALID_ARGUMENT"),
        ({"timeout": {"seconds": -1}}, "INVALID_ARGUMENT"),
    ],
)
async def test_malformed_parts_are_refused_and_the_stream_goes_on(orchestrator, change, code) -> None:
    async with raw_stream(orchestrator) as stream:
        first, *others = in_parts(1, large("a", 2))
        changed = {name: value for name, value in change.items() if name != "timeout"}
        for name in changed:
            first.part.ClearField(name)
        first.part.MergeFrom(session_pb2.MessagePart(**changed))
        if "timeout" in change:
            first.timeout.seconds = -1
        for message in (first, *others):
            await stream.write(message)
        assert (await refusal(stream, 1)).code.name == code
        for message in in_parts(2, large("b", 2)):
            await stream.write(message)
        assert (await stream.read()).recorded.parent == "eb"


async def test_a_gateway_that_does_not_take_parts_is_told_that_the_answer_is_too_large(orchestrator) -> None:
    orchestrator.recorded["a"] = large("a").generation
    async with raw_stream(orchestrator) as stream:
        get = session_pb2.GetGenerationRequest(generation_id="a")
        asked = session_pb2.ExchangeRequest(call=1, get=get, on_behalf_of="ann", timeout={"seconds": 9})
        await stream.write(asked)
        error = await refusal(stream, 1)
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MESSAGE_TOO_LARGE")


async def again(call):
    """Make a call until a server is there."""
    answers = []
    async with asyncio.timeout(DEADLINE_S):
        while not answers:
            try:
                answers.append(await call())
            except SluiceError as error:
                if error.code is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.01)
    return answers[0]


class BrokenStream:
    """What gRPC shows when a connection is lost while a message is read."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core")

    async def write(self, request):
        pass

    async def read(self):
        raise self._error

    def cancel(self):
        pass


class OldOrchestrator(session_pb2_grpc.SessionServiceServicer):
    """As of v0.1.0: it has the calls, and not the stream of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def _note(self, kind, context) -> None:
        self.calls.append((kind, dict(context.invocation_metadata())["on-behalf-of"]))

    async def BeginGeneration(self, request, context):
        self._note("begin", context)
        if request.request_id == "ended":
            raise SluiceError.failed_precondition("SESSION_ENDED", "it is over")
        return session_pb2.BeginGenerationResponse(parent="p")

    async def RecordGeneration(self, request, context):
        self._note("record", context)
        return session_pb2.RecordGenerationResponse(parent=request.episode_id)

    async def GetGeneration(self, request, context):
        self._note("get", context)
        return session_pb2.GetGenerationResponse(generation={"request_id": request.generation_id})


async def test_an_older_orchestrator_gets_each_call_by_itself() -> None:
    old = OldOrchestrator()
    async with serving(old) as (_, port), calling(port) as exchange:
        with capture_logs() as logs:
            # gRPC may hide why a stream ended while something was being written: then they are made again, as by a gateway.
            calls = (partial(exchange.record, record(f"e{i}"), "ann", DEADLINE_S) for i in range(20))
            answers = await asyncio.gather(*(again(each) for each in calls))
            begun = await exchange.begin(session_pb2.BeginGenerationRequest(request_id="r"), "bob", DEADLINE_S)
        got = await exchange.get(session_pb2.GetGenerationRequest(generation_id="g"), "ann", DEADLINE_S)
        with pytest.raises(SluiceError) as ended:
            await exchange.begin(session_pb2.BeginGenerationRequest(request_id="ended"), "ann", DEADLINE_S)
        large = record("large")
        large.generation.request_id = "x" * MAX_MESSAGE_BYTES
        with pytest.raises(SluiceError, match="upgrade it") as refused:
            await exchange.record(large, "ann", DEADLINE_S)
    assert [each.parent for each in answers] == [f"e{i}" for i in range(20)]
    assert (begun.parent, got.generation.request_id) == ("p", "g")
    assert (ended.value.reason, refused.value.reason) == ("SESSION_ENDED", "OLD_ORCHESTRATOR")
    assert old.calls == [("record", "ann")] * 20 + [("begin", "bob"), ("get", "ann"), ("begin", "ann")]
    assert [each["log_level"] for each in logs if "older than this gateway" in each["event"]] == ["warning"]


async def test_an_orchestrator_that_was_upgraded_gets_the_stream_again(orchestrator, port) -> None:
    clock, old = SimulatedClock(), OldOrchestrator()
    async with calling(port, clock) as exchange:
        async with serving(old, port):
            await again(lambda: exchange.record(record("before"), "ann", DEADLINE_S))
        async with serving(orchestrator, port):
            clock.now += OLD_S
            answer = await again(lambda: exchange.record(record("after"), "ann", DEADLINE_S))
    assert old.calls == [("record", "ann")]
    assert (answer.parent, orchestrator.streams) == ("after", 1)


@pytest.mark.parametrize("shown", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE])
async def test_calls_of_a_stream_that_broke_may_be_made_again(shown) -> None:
    class Sessions:
        def Exchange(self):
            return BrokenStream(shown)

    with pytest.raises(SluiceError) as broken:
        await Exchange(Sessions()).record(record("e"), "ann", DEADLINE_S)
    assert (broken.value.code, broken.value.reason) == (grpc.StatusCode.UNAVAILABLE, "STREAM_BROKE")


async def test_a_stream_that_breaks_does_not_cancel_an_answer_that_is_being_written():
    """GRPC fails to end a call while one of its messages is being written."""
    writing, broke, read = asyncio.Event(), asyncio.Event(), asyncio.Event()
    written: list[int] = []

    async def requests():
        yield session_pb2.ExchangeRequest(
            call=1, on_behalf_of="a", record=session_pb2.RecordGenerationRequest(episode_id="e"), timeout={"seconds": 9}
        )
        await writing.wait()
        broke.set()
        raise SluiceError.invalid_argument("call", "is broken")

    async def write(answer):
        writing.set()
        await read.wait()
        written.append(answer.call)

    async with asyncio.timeout(DEADLINE_S):
        orchestrator = Orchestrator()
        ended = asyncio.create_task(
            served.answer_exchange(
                requests(), write, orchestrator._begin, orchestrator._record, orchestrator._get, most_bytes=0
            )
        )
        await broke.wait()
        read.set()
        with pytest.raises(SluiceError, match="broken"):
            await ended
    assert written == [1]
