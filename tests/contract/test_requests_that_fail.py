"""Requests that replicas cannot serve: each ends with an error that says who answered what, and costs others nothing.

The network is real and time is simulated, as in test_replica_failover.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc
import pytest
from scripted_replica import STEP_S, ScriptedReplica, until
from structlog.testing import capture_logs
from test_replica_failover import Fleet, assert_whole, fleet

from sluice.rpc import MAX_MESSAGE_BYTES, SluiceError
from sluice.v1 import rollout_pb2

UNEXPECTED = SluiceError(grpc.StatusCode.INTERNAL, "UNEXPECTED", "the server failed unexpectedly (KeyError)")
CRASHED = SluiceError.unavailable("ENGINE_FAILED", "the engine died; retry", 1.0)
FULL = SluiceError.resource_exhausted("QUEUE_FULL", "4 samples are queued", 2.0)
POISON = "poison"


@dataclass
class Fragile(ScriptedReplica):
    """A replica that fails at requests with a text: as often as `failing` says, or always.

    Attributes:
        error: What it answers to them.
        failing: How often it answers so.
        refused: Ids of the requests that it answered so.
    """

    error: SluiceError = UNEXPECTED
    failing: int = 1 << 30
    refused: list[str] = field(default_factory=list)

    async def _stream(self, wanted):
        if wanted.text == POISON and len(self.refused) < self.failing:
            self.refused.append(wanted.request_id)
            raise self.error
        async for message in super()._stream(wanted):
            yield message

    async def Tokenize(self, request, context):  # noqa: N802 - gRPC names it
        if request.text == POISON and len(self.refused) < self.failing:
            self.refused.append("tokenize")
            raise self.error
        return rollout_pb2.TokenizeResponse(token_ids=[1])


def fragile(name: str, **script) -> Fragile:
    return Fragile(name, **{"pace_s": 1.0, **script})


def ask(scene: Fleet, text: str = POISON) -> asyncio.Task[rollout_pb2.GenerateResponse]:
    sampling = {"max_tokens": 24, "seed": 5}
    request = rollout_pb2.GenerateRequest(request_id=text, text=text, n=4, sampling=sampling, return_text=True)
    return asyncio.create_task(scene.engine.agenerate(request))


async def failure(scene: Fleet, call: asyncio.Task[object]) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await scene.time.result(call)
    return caught.value


async def test_a_request_that_every_replica_fails_at_ends_with_what_each_answered() -> None:
    first, second = fragile("first"), fragile("second")
    async with fleet(first, second) as scene:
        error = await failure(scene, ask(scene))
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "UNEXPECTED")
        assert "failed 3 times" in error.message
        assert "first: INTERNAL UNEXPECTED" in error.message
        assert "second: INTERNAL UNEXPECTED" in error.message
        assert len(first.refused) + len(second.refused) == 3
        assert len({*first.refused, *second.refused}) == 3, "a replica answers an id that it knows from memory"


async def test_three_replicas_are_asked_once_each() -> None:
    replicas = [fragile(name) for name in ("first", "second", "third")]
    async with fleet(*replicas) as scene:
        await failure(scene, ask(scene))
        assert [len(each.refused) for each in replicas] == [1, 1, 1]


async def test_a_request_at_fault_gives_one_replica_a_rest_and_others_work_meanwhile() -> None:
    replicas = [fragile(name) for name in ("first", "second", "third")]
    async with fleet(*replicas) as scene:
        for _ in range(8):
            call, resting = ask(scene), 0
            while not call.done():
                await scene.time.wait(STEP_S)
                resting = max(resting, sum(bool(each.why_not()) for each in scene.pool.replicas))
            assert resting <= 1
            await failure(scene, call)
        await scene.time.wait(1.0)
        assert not any(each.why_not() for each in scene.pool.replicas), (
            "a rest does not grow by requests that fail everywhere"
        )
        assert_whole(await scene.time.result(ask(scene, "good")))


async def test_a_replica_that_fails_alone_is_passed_over() -> None:
    failing, other = fragile("failing"), fragile("other", failing=0)
    async with fleet(failing, other) as scene:
        scene.pool._homes.remember(["episode"], scene.known(failing).target)
        request = rollout_pb2.GenerateRequest(
            text=POISON, n=4, sampling={"max_tokens": 24, "seed": 5}, return_text=True
        )
        call = asyncio.create_task(scene.engine.agenerate(request, ["episode"]))
        assert_whole(await scene.time.result(call))
        assert len(failing.refused) == 1


async def test_an_only_replica_that_fails_twice_is_asked_a_third_time() -> None:
    only = fragile("only", failing=2)
    async with fleet(only) as scene:
        assert_whole(await scene.time.result(ask(scene)))
        assert len(only.refused) == 2


async def test_a_request_whose_engines_die_does_not_go_on_for_ever() -> None:
    first, second = fragile("first", error=CRASHED), fragile("second", error=CRASHED)
    async with fleet(first, second) as scene:
        error = await failure(scene, ask(scene))
        assert "interrupted 8 times in a row, the last time because: UNAVAILABLE ENGINE_FAILED" in error.message
        assert len(first.refused) + len(second.refused) == 8


async def test_a_prompt_that_no_replica_can_tokenize_is_an_error_too() -> None:
    first, second = fragile("first"), fragile("second")
    async with fleet(first, second) as scene:
        error = await failure(
            scene, asyncio.create_task(scene.engine.tokenize(rollout_pb2.TokenizeRequest(text=POISON)))
        )
        assert "failed 3 times" in error.message
        assert len(first.refused) + len(second.refused) == 3


async def test_a_full_replica_is_asked_later_and_the_log_says_so_once() -> None:
    only = fragile("only", error=FULL, failing=20)
    async with fleet(only) as scene:
        began = scene.time.clock()
        with capture_logs() as told:
            assert_whole(await scene.time.result(ask(scene)))
        assert len(only.refused) == 20
        assert scene.time.clock() - began >= 20 * 2.0, "it was asked when it had said"
    waits = [each for each in told if "QUEUE_FULL" in str(each.get("error"))]
    assert [each["log_level"] for each in waits].count("warning") == 1
    assert {each["log_level"] for each in waits} <= {"warning", "debug"}


@pytest.mark.slow
async def test_a_replica_that_drains_is_waited_for_beyond_any_number_of_tries() -> None:
    away = SluiceError.unavailable("DRAINING", "this replica is shutting down; use another one", 1.0)
    only = fragile("only", error=away, failing=30)
    async with fleet(only) as scene:
        assert_whole(await scene.time.result(ask(scene)))
        assert len(only.refused) == 30


async def test_calls_that_wait_for_a_replica_are_in_the_log_once_with_the_cause() -> None:
    only = fragile("only")
    async with fleet(only) as scene:
        scene.pool.retire(scene.known(only).target, "only")
        with capture_logs() as told:
            calls = [ask(scene, f"good {number}") for number in range(3)]
            await scene.time.wait(30.0)
        (line,) = (each for each in told if each["event"] == "calls wait for a replica")
        assert "only is draining" in line["reason"]
        for each in calls:
            each.cancel()
        await asyncio.wait(calls)


async def test_a_message_that_is_too_large_is_refused_at_once_and_costs_the_replica_nothing() -> None:
    only = fragile("only")
    async with fleet(only) as scene:
        limit = scene.known(only).limit.samples
        request = rollout_pb2.GenerateRequest(text="x" * (MAX_MESSAGE_BYTES + (1 << 20)), n=1)
        with pytest.raises(SluiceError) as caught:
            await scene.engine.agenerate(request)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "message_bytes" in caught.value.violations
        assert scene.known(only).limit.samples == limit
        assert not scene.known(only).why_not()
        assert scene.pool.counts["retried"] == 0
        await until(lambda: not scene.known(only).works)
