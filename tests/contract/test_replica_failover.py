"""Requests over gRPC to replicas that die, hang, stop, pause, drain or lie: each is answered as if nothing had happened.

The network is real and time is simulated: it passes only where a test lets it, and never while a message is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from scripted_replica import LENGTH, PROMPT, RUNNING, Cable, ScriptedReplica, Timeline, connected, sampled, until
from simulated_clock import SimulatedClock

from orchestrator_svc.announcements import Announcements
from orchestrator_svc.config import FoundReplicasConfig
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError
from sluice.sampling.config import ConcurrencyConfig, ReplicasConfig
from sluice.sampling.policy import PolicyEngine, TokenStream
from sluice.sampling.pool import ReplicaPool
from sluice.sampling.replica import Replica
from sluice.v1 import rollout_pb2
from sluice.versions import BASE, Version

DEADLINE_S = 120.0
"""Real seconds for one test; only a broken one takes them."""

TOKENS = 24
PROGRESS_S = 60.0
SETTINGS = {
    "poll_s": 5.0,
    "progress_s": PROGRESS_S,
    "coalesce_s": 20.0,
    "paused_s": 6000.0,
    "switch_s": 6000.0,
    "longest_step_s": 6000.0,
    "resolve_s": 6000.0,
}
"""In simulated seconds, but for the deadlines of calls to replicas."""


@dataclass
class Fleet:
    """Scripted replicas, their cables, and the pool that knows them."""

    replicas: list[ScriptedReplica]
    cables: list[Cable]
    pool: ReplicaPool
    announcements: Announcements
    engine: PolicyEngine
    time: Timeline

    def known(self, replica: ScriptedReplica) -> Replica:
        return next(each for each in self.pool.replicas if each.name == replica.name)

    def announce(self, name: str, address: str, owner: str = "") -> None:
        self.announcements.register(name, address, owner, from_here=True)

    def ask(self, n: int = 4, keys: tuple[str, ...] = ()) -> asyncio.Task[rollout_pb2.GenerateResponse]:
        request = rollout_pb2.GenerateRequest(
            request_id="r", text="x", n=n, sampling={"max_tokens": TOKENS, "seed": 5}, return_text=True
        )
        return asyncio.create_task(self.engine.agenerate(request, keys))


@contextlib.asynccontextmanager
async def fleet(*replicas: ScriptedReplica, announced: bool = False, **settings) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        served = [await stack.enter_async_context(connected(each)) for each in replicas]
        addresses = [] if announced else [address for address, _ in served]
        config = FoundReplicasConfig(**{"lease_s": 6000.0, **SETTINGS, **settings})
        clock = SimulatedClock()
        pool = ReplicaPool(addresses, SecurityConfig(), config, lambda _: None, clock=clock)
        cables = [cable for _, cable in served]
        time = Timeline(clock, pool, list(zip(replicas, cables, strict=True)))
        announcements = Announcements(pool, config)
        polling = {asyncio.create_task(each.run()) for each in (pool, announcements)}
        try:
            async with asyncio.timeout(DEADLINE_S):
                await until(lambda: sum(not each.why_not() for each in pool.replicas) == len(addresses))
                engine = PolicyEngine(pool, "test", 600.0)
                yield Fleet(list(replicas), cables, pool, announcements, engine, time)
        finally:
            for each in polling:
                each.cancel()
            await asyncio.wait(polling)


def replica(name: str, **script) -> ScriptedReplica:
    """A replica that sends a message each second."""
    return ScriptedReplica(name, **{"pace_s": 1.0, **script})


def assert_whole(response: rollout_pb2.GenerateResponse, n: int = 4, versions: tuple[int, ...] = (0,)) -> None:
    """The answer is that of one undisturbed replica, but for the versions."""
    assert list(response.prompt_token_ids) == PROMPT
    assert [sample.index for sample in response.samples] == list(range(n))
    for index, sample in enumerate(response.samples):
        ids = sampled(33 + (5 + index) % 90, TOKENS)
        assert list(sample.token_ids) == ids
        assert list(sample.logprobs) == pytest.approx([-each / 64 for each in ids])
        assert [span.policy_version.number for span in sample.version_spans] == list(versions)
        assert sample.version_spans[0].start == 0
        assert (sample.finish_reason, sample.text) == (LENGTH, "".join(map(chr, ids)))


def pair(**script) -> tuple[ScriptedReplica, ScriptedReplica]:
    """A replica that fails as scripted and another one, which serves the next version and is busy at first."""
    return replica("failing", **script), replica("other", version=Version(1, 1))


async def begun(scene: Fleet, n: int = 4) -> asyncio.Task[rollout_pb2.GenerateResponse]:
    """Ask the first replica, and wait until some tokens have arrived."""
    failing = scene.known(scene.replicas[0])
    scene.pool._homes.remember(["episode"], failing.target)
    call = scene.ask(n, ("episode",))
    await scene.time.until(lambda: scene.replicas[0].steps > 2)
    await until(lambda: [work.progress.stage for work in failing.works] == [RUNNING])
    return call


def evictions(scene: Fleet) -> list[str]:
    return [name for name in scene.pool.counts if name.startswith("evicted")]


async def test_samples_of_a_dead_replica_continue_side_by_side_from_their_tokens() -> None:
    failing, other = pair()
    async with fleet(failing, other) as scene:
        call = await begun(scene)
        await scene.cables[0].cut()
        assert_whole(await scene.time.result(call), versions=(0, 1))
        assert [each.n for each in other.requests] == [1, 1, 1, 1]
        assert other.most_open == 4
        counts = scene.pool.counts
        assert (counts["evicted_dead"], counts["retried"], counts["continued"]) == (1, 1, 4)
        assert counts["tokens_kept"] >= 4 * failing.per_message
        assert counts["tokens_kept"] == sum(each.continued_tokens for each in other.requests)
        assert "does not answer" in scene.known(failing).why_not()


async def test_a_replica_behind_a_frozen_connection_is_evicted_and_rejoins() -> None:
    failing, other = pair()
    async with fleet(failing, other) as scene:
        call = await begun(scene)
        scene.cables[0].freeze()
        assert_whole(await scene.time.result(call), versions=(0, 1))
        assert scene.pool.counts["evicted_silent"] == 1
        assert "sent nothing" in scene.known(failing).why_not()
        scene.cables[0].thaw()
        await scene.time.until(lambda: not scene.known(failing).why_not())


async def test_an_engine_that_makes_no_step_is_evicted_though_its_replica_answers() -> None:
    failing, other = pair(stalls_after=2)
    async with fleet(failing, other) as scene:
        call = await begun(scene)
        await scene.time.until(lambda: scene.known(failing).loss)
        await until(lambda: not failing.open)  # its call was cancelled
        await scene.time.until(lambda: scene.known(failing).loss is None)  # it has nothing to do, and rests
        assert "stalled" in scene.known(failing).why_not()
        assert_whole(await scene.time.result(call), versions=(0, 1))
        assert scene.pool.counts["evicted_stalled"] == 1
        await scene.time.until(lambda: not scene.known(failing).why_not())


async def test_a_stream_that_is_silent_alone_is_given_up_alone() -> None:
    failing, other = pair(silent_after=2)
    async with fleet(failing, other) as scene:
        call = await begun(scene)
        failing.max_running = 0
        while not call.done():  # other requests keep the engine going
            failing.steps += 1
            await scene.time.wait(1.0)
        assert_whole(await call, versions=(0, 1))
        assert not evictions(scene)


async def test_a_hanging_replica_keeps_its_calls_while_there_is_no_other() -> None:
    failing = replica("only")
    async with fleet(failing) as scene:
        call = await begun(scene)
        scene.cables[0].freeze()
        await scene.time.until(lambda: scene.known(failing).loss)
        await scene.time.wait(3 * PROGRESS_S)
        scene.cables[0].thaw()
        assert_whole(await scene.time.result(call))
        assert scene.pool.counts["retried"] == 0


async def test_an_engine_that_was_only_slow_gets_work_again_at_once_if_there_is_no_other() -> None:
    failing = replica("only", stalls_after=2)
    async with fleet(failing) as scene:
        call = await begun(scene)
        await scene.time.until(lambda: scene.known(failing).loss)
        failing.stalls_after = None
        assert_whole(await scene.time.result(call))
        await scene.time.until(lambda: not scene.known(failing).loss)
        assert not scene.known(failing).why_not(), "it rests only when another one took its requests"
        assert (scene.pool.counts["retried"], scene.pool.counts["evicted_stalled"]) == (0, 1)


async def test_a_pause_is_no_hang() -> None:
    failing, other = pair()
    async with fleet(failing, other) as scene:
        call = await begun(scene)
        failing.paused = True
        await scene.time.wait(3 * PROGRESS_S)
        assert not call.done()
        failing.paused = False
        assert_whole(await scene.time.result(call))
        assert not other.requests
        assert not evictions(scene)


async def test_a_request_leaves_a_replica_that_is_paused_for_long() -> None:
    failing, other = pair()
    async with fleet(failing, other, paused_s=PROGRESS_S + 10.0) as scene:
        call = await begun(scene)
        failing.paused = True
        assert_whole(await scene.time.result(call), versions=(0, 1))
        assert not evictions(scene)
        assert scene.pool.pick(BASE).name == "other"


async def test_a_switch_of_weights_that_takes_long_is_no_hang() -> None:
    failing, other = pair()
    async with fleet(failing, other) as scene:
        call = await begun(scene)
        failing.switching = True
        await scene.time.wait(3 * PROGRESS_S)
        assert not call.done()
        assert scene.pool.pick(BASE).name == "other", "what is new need not wait"
        failing.switching = False
        assert_whole(await scene.time.result(call))
        assert not other.requests
        assert not evictions(scene)


async def test_a_replica_that_does_not_end_a_switch_is_evicted() -> None:
    failing, other = pair()
    async with fleet(failing, other, switch_s=PROGRESS_S + 10.0) as scene:
        call = await begun(scene)
        failing.switching = True
        assert_whole(await scene.time.result(call), versions=(0, 1))
        assert scene.pool.counts["evicted_switching"] == 1
        assert "switching to other weights" in scene.known(failing).why_not()
        failing.switching = False
        await scene.time.until(lambda: not scene.known(failing).why_not())


@pytest.mark.slow
async def test_a_step_that_takes_longer_than_a_hang_ends_at_one_of_the_replicas() -> None:
    """A long prompt: each replica that it stalls gets twice the time of the one before."""
    one, two = (replica(name, prefill_s=2.7 * PROGRESS_S) for name in ("one", "two"))
    async with fleet(one, two) as scene:
        assert_whole(await scene.time.result(scene.ask()))
        assert scene.pool.counts["evicted_stalled"] >= 2
        assert len(one.requests) + len(two.requests) <= 4


@pytest.mark.slow
async def test_a_request_that_stalls_each_engine_fails() -> None:
    one, two = (replica(name, prefill_s=3600.0) for name in ("one", "two"))
    async with fleet(one, two, longest_step_s=PROGRESS_S) as scene:
        with pytest.raises(SluiceError, match=r"interrupted 8 times in a row.*no step"):
            await scene.time.result(scene.ask())
        assert len({each.request_id for each in [*one.requests, *two.requests]}) == 8


async def test_more_time_for_a_step_ends_with_the_first_token() -> None:
    failing, other = pair(prefill_s=3600.0)
    other.stalls_after = 2
    async with fleet(failing, other) as scene:
        scene.pool._homes.remember(["episode"], scene.known(failing).target)
        call = scene.ask(4, ("episode",))
        await scene.time.until(lambda: other.open)
        known = scene.known(other)
        assert known.step_s == 2 * PROGRESS_S
        await scene.time.until(lambda: other.steps > 2)
        assert known.step_s == PROGRESS_S
        call.cancel()
        await asyncio.wait({call})


async def test_samples_that_a_draining_replica_hands_over_continue() -> None:
    failing, other = pair(aborts_after=3)
    async with fleet(failing, other) as scene:
        call = await begun(scene)
        failing.state = rollout_pb2.REPLICA_STATE_DRAINING
        assert_whole(await scene.time.result(call), versions=(0, 1))
        counts = scene.pool.counts
        assert (counts["continued"], counts["retried"], counts["tokens_lost"]) == (4, 0, 0)
        await scene.time.until(lambda: scene.known(failing).why_not())
        assert_whole(await scene.time.result(scene.ask()), versions=(1,))
        assert len(failing.requests) == 1, "it gets nothing new"


async def test_a_request_that_meets_a_draining_replica_goes_elsewhere() -> None:
    failing, other = pair()
    async with fleet(failing, other) as scene:
        scene.pool._homes.remember(["episode"], scene.known(failing).target)
        failing.state = rollout_pb2.REPLICA_STATE_DRAINING  # between two polls
        call = scene.ask(4, ("episode",))
        await until(lambda: other.open)
        assert len(failing.requests) == 1
        assert_whole(await scene.time.result(call), versions=(1,))
        assert scene.pool.counts["evicted_dead"] == 0


async def test_nothing_is_kept_of_a_stream_with_wrong_offsets() -> None:
    failing, other = pair(damaged_after=2)
    async with fleet(failing, other) as scene:
        assert_whole(await scene.time.result(await begun(scene)), versions=(1,))
        assert scene.pool.counts["tokens_lost"] == 4 * 2 * failing.per_message
        assert [each.n for each in other.requests] == [4]


async def test_a_request_that_is_interrupted_again_and_again_fails() -> None:
    failing = replica("only", damaged_after=0)
    async with fleet(failing) as scene:
        with pytest.raises(SluiceError, match=r"interrupted 8 times in a row.*STREAM_DAMAGED"):
            await scene.time.result(scene.ask())
        assert len({each.request_id for each in failing.requests}) == len(failing.requests)


async def test_a_request_that_kills_its_replicas_does_not_go_on_for_ever() -> None:
    only = replica("only", prefill_s=3600.0)
    async with fleet(only) as scene:
        call = scene.ask()
        known = scene.known(only)

        def it_is_begun() -> bool:
            return any(work.progress.stage == RUNNING for work in known.works)

        for _ in range(8):
            await scene.time.until(it_is_begun)
            scene.cables[0].jolt()
            await until(lambda: not known.works)
        with pytest.raises(SluiceError, match=r"interrupted 8 times in a row.*UNAVAILABLE"):
            await scene.time.result(call)


async def test_a_caller_that_leaves_ends_all_that_was_asked_for_it() -> None:
    failing, other = pair()
    async with fleet(failing, other) as scene:
        call = await begun(scene)
        await scene.cables[0].cut()
        await until(lambda: other.open == 4)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: other.open == 0)
        assert not any(each.works or each.in_flight for each in scene.pool.replicas)


async def test_the_seconds_in_which_a_replica_has_samples_are_summed_over_samples() -> None:
    only = replica("only")
    async with fleet(only) as scene:
        known, clock = scene.known(only), scene.time.clock
        before = known.describe().sample_seconds
        with known.working(asyncio.create_task(asyncio.sleep(0)), 3, streams=False):
            await clock.advance(2.0)
            with known.working(asyncio.create_task(asyncio.sleep(0)), 1, streams=False):
                await clock.advance(0.5)
                assert known.describe().sample_seconds - before == pytest.approx(3 * 2.0 + 4 * 0.5)
        await clock.advance(5.0)
        assert known.describe().sample_seconds - before == pytest.approx(3 * 2.0 + 4 * 0.5)


@pytest.mark.slow
async def test_turns_of_an_episode_go_where_its_prefix_is_until_that_replica_is_lost() -> None:
    first, second = replica("first"), replica("second")
    async with fleet(first, second) as scene:
        for _ in range(5):
            await scene.time.result(scene.ask(1, ("episode-1", "group-1")))
        home = first if first.requests else second
        assert len(home.requests) == 5
        await scene.cables[scene.replicas.index(home)].cut()
        await scene.time.until(lambda: scene.known(home).loss)
        other = second if home is first else first
        await scene.time.result(scene.ask(1, ("episode-1", "group-1")))
        assert len(other.requests) == 1


async def test_another_process_at_the_same_address_gets_no_old_state() -> None:
    only = replica("one")
    async with fleet(only) as scene:
        (known,) = scene.pool.replicas
        await scene.time.result(scene.ask(1, ("episode",)))
        only.name, only.start_s, only.digest, only.version = "two", 2, "another", BASE
        await scene.time.until(lambda: known.name == "two")
        assert (known.model.tokenizer_digest, known.version) == ("another", BASE)
        assert only.models_asked == 2
        assert not scene.pool._homes.find(["episode"])


async def test_an_announced_replica_is_used_at_once_and_leaves_with_its_lease() -> None:
    first, second = replica("first"), replica("second")
    async with fleet(first, second, announced=True, lease_s=30.0) as scene:
        targets = [f"127.0.0.1:{cable.port}" for cable in scene.cables]
        scene.announce("first", targets[0])
        scene.announce("second", targets[1])
        await until(lambda: sum(not each.why_not() for each in scene.pool.replicas) == 2)
        while len(scene.pool.replicas) == 2:  # the second one renews its lease no more
            scene.announcements.heartbeat("first")
            await scene.time.wait(1.0)
        assert [each.name for each in scene.pool.replicas] == ["first"]
        with pytest.raises(KeyError):
            scene.announcements.heartbeat("second")


async def test_a_replica_whose_lease_ends_finishes_what_it_has() -> None:
    only = replica("only")
    async with fleet(only, announced=True, lease_s=3.0) as scene:
        scene.announce("only", f"127.0.0.1:{scene.cables[0].port}")
        call = scene.ask()
        await until(lambda: only.open)
        await scene.time.until(lambda: "lease is over" in scene.pool.replicas[0].why_not())
        assert not call.done()
        assert_whole(await scene.time.result(call))
        await scene.time.until(lambda: not scene.pool.replicas)
        assert len(only.requests) == 1


@pytest.mark.slow
async def test_a_replica_that_says_that_it_leaves_gets_nothing_new_at_once() -> None:
    leaving, other = replica("leaving"), replica("other", version=Version(1, 1))
    async with fleet(leaving, other, announced=True) as scene:
        scene.announce("leaving", f"127.0.0.1:{scene.cables[0].port}")
        call = scene.ask()
        await until(lambda: leaving.open)
        scene.announce("other", f"127.0.0.1:{scene.cables[1].port}")
        scene.announcements.leave("leaving")
        leaving.state = rollout_pb2.REPLICA_STATE_DRAINING
        later = scene.ask()
        await until(lambda: other.open)
        assert_whole(await scene.time.result(later), versions=(1,))
        assert_whole(await scene.time.result(call))
        await scene.time.until(lambda: "draining" in scene.known(leaving).why_not())
        await scene.cables[0].cut()
        await scene.time.until(lambda: [each.name for each in scene.pool.replicas] == ["other"])
        assert not evictions(scene), "it ended as it said"


@pytest.mark.slow
async def test_a_replica_at_a_configured_address_may_announce_that_it_leaves() -> None:
    """Its last answer to a poll may still say that it serves."""
    leaving, other = pair()
    async with fleet(leaving, other) as scene:
        known = scene.known(leaving)
        scene.announce("failing", known.target)
        scene.announcements.leave("failing")
        assert "draining" in known.why_not()
        asked = known.progress.heard_at
        await scene.time.until(lambda: known.progress.heard_at > asked)
        assert "draining" in known.why_not()
        await scene.cables[0].cut()
        await scene.time.until(lambda: known.loss)
        assert not evictions(scene)


async def test_a_replica_that_left_and_announces_itself_again_gets_work() -> None:
    """An operator said that it leaves, and it did not."""
    only = replica("only")
    async with fleet(only, announced=True) as scene:
        target = f"127.0.0.1:{scene.cables[0].port}"
        scene.announce("only", target)
        await until(lambda: scene.pool.replicas and not scene.pool.replicas[0].why_not())
        scene.announcements.leave("only")
        assert "draining" in scene.known(only).why_not()
        scene.announce("only", target)
        await scene.time.until(lambda: scene.pool.replicas and not scene.pool.replicas[0].why_not())


async def test_an_announced_name_does_not_stand_for_a_replica_at_a_configured_address() -> None:
    victim, other = pair()
    async with fleet(victim, other) as scene:
        known = scene.known(victim)
        with pytest.raises(SluiceError, match=r"NAME_TAKEN.*peers.rollout.*'failing'.*rollout.replica"):
            scene.announce("failing", "127.0.0.1:9", "mallory")
        scene.announce("another name", known.target, "mallory")
        scene.announcements.leave("another name")
        assert not known.why_not()


async def test_a_replica_under_another_name_than_it_announced_gets_no_work() -> None:
    first, second = replica("first"), replica("second")
    async with fleet(first, second, announced=True) as scene:
        target = f"127.0.0.1:{scene.cables[0].port}"
        scene.announce("alias", target, "one")
        await until(lambda: scene.pool.replicas and scene.pool.replicas[0].seen)
        assert "its name is 'first'" in scene.pool.replicas[0].why_not()
        with pytest.raises(SluiceError, match=r"ADDRESS_TAKEN.*'alias'.*principal 'one'"):
            scene.announce("first", target, "two")
        scene.announce("first", target, "one")
        assert not scene.pool.replicas[0].why_not()
        assert scene.announcements.owner("alias") is None, "one process serves at an address"


async def test_a_principal_announces_so_many_replicas_and_no_more() -> None:
    async with fleet(announced=True, most_per_principal=2) as scene:
        for number in (1, 2):
            scene.announce(f"r{number}", f"127.0.0.1:{number}", "one")
        with pytest.raises(SluiceError, match=r"TOO_MANY_REPLICAS.*2 replicas.*most_per_principal"):
            scene.announce("r3", "127.0.0.1:3", "one")
        scene.announce("r3", "127.0.0.1:3", "two")
        scene.announcements.heartbeat("r1")
        scene.announce("r1", "127.0.0.1:4", "one")  # it moves
        scene.announcements.leave("r2")
        scene.announce("r4", "127.0.0.1:5", "one")


async def test_a_replica_that_was_announced_by_name_leaves_with_its_lease() -> None:
    only = replica("only")
    async with fleet(only, announced=True, lease_s=3.0) as scene:
        scene.announce("only", f"localhost:{scene.cables[0].port}")
        call = scene.ask()
        await until(lambda: only.open)
        await scene.time.until(lambda: any("lease is over" in each.why_not() for each in scene.pool.replicas))
        assert_whole(await scene.time.result(call))
        await scene.time.until(lambda: not scene.pool.replicas)


async def test_the_replicas_together_say_how_many_groups_may_run() -> None:
    first, second = replica("first", max_running=16), replica("second", max_running=16)
    concurrency = ConcurrencyConfig(initial_samples=64)
    config = ReplicasConfig(**SETTINGS)
    async with connected(first) as (one, _), connected(second) as (two, _), asyncio.timeout(DEADLINE_S):
        pool = ReplicaPool([one, two], SecurityConfig(), config, lambda _: None, concurrency=concurrency, group=8)
        polling = asyncio.create_task(pool.run())
        try:
            await until(lambda: sum(not each.why_not() for each in pool.replicas) == 2)
            # Twice its places and two groups in reserve, at each.
            assert (pool.has_room(11), pool.has_room(12)) == (True, False)
        finally:
            polling.cancel()
            await asyncio.wait({polling})


async def test_versions_that_are_wanted_one_after_the_other_are_each_seen_at_once() -> None:
    only = replica("only", version=Version(1, 0))
    async with fleet(only) as scene:
        for number in range(1, 6):
            wanted = Version(1, number)
            assert scene.pool.pick(wanted) is None
            scene.pool.wait_for(wanted)
            only.version = wanted
            await until(lambda wanted=wanted: scene.pool.pick(wanted))  # and no time passes
            scene.pool.wait_for(None)


class Patient(ScriptedReplica):
    """Answers a status request when it serves the awaited version, and counts them."""

    asked = 0

    async def GetStatus(self, request, context):  # noqa: N802 - gRPC's name
        self.asked += 1
        if request.HasField("awaited_version"):
            await until(lambda: self.version >= Version.from_proto(request.awaited_version))
        return await super().GetStatus(request, context)


async def test_a_version_that_dispatch_waits_for_is_asked_for_once() -> None:
    patient = Patient("only", version=Version(1, 0))
    async with fleet(patient) as scene:
        asked, wanted = patient.asked, Version(1, 1)
        scene.pool.wait_for(wanted)
        await until(lambda: patient.asked > asked)
        for _ in range(10):
            await scene.time.clock.advance(1.0)
            await scene.engine.tokenize(rollout_pb2.TokenizeRequest())  # a status request would have come before it
        assert patient.asked == asked + 1
        patient.version = wanted
        await until(lambda: scene.pool.pick(wanted))


async def test_prompt_log_probabilities_are_refused_with_the_remedy() -> None:
    engine = PolicyEngine(ReplicaPool([], SecurityConfig(), ReplicasConfig(), lambda _: None), "test", 1.0)
    with pytest.raises(SluiceError, match="call Generate"):
        await engine.agenerate(rollout_pb2.GenerateRequest(return_prompt_logprobs=True))


@dataclass
class ReadAlong:
    """A client of a gateway: what it read it cannot forget."""

    ids: dict[int, list[int]]
    text: dict[int, str]
    opening: rollout_pb2.StreamOpening | None = None
    signs_of_life: int = 0

    async def read(self, stream: TokenStream) -> rollout_pb2.GenerateResponse:
        async for message in stream:
            if message.HasField("opening"):
                assert self.opening is None
                self.opening = message.opening
            self.signs_of_life += not message.HasField("opening") and not message.chunk.deltas
            for delta in message.chunk.deltas:
                ids = self.ids.setdefault(delta.tokens.index, [])
                assert delta.offset == len(ids)
                ids.extend(delta.tokens.token_ids)
                self.text[delta.tokens.index] = self.text.get(delta.tokens.index, "") + delta.tokens.text
        return stream.response


def asked(n: int = 4) -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(
        request_id="r", text="x", n=n, sampling={"max_tokens": TOKENS, "seed": 5}, return_text=True
    )


@pytest.mark.parametrize("failure", ["dies", "hands over", "sends damage"])
async def test_a_client_that_reads_along_sees_no_failure(failure: str) -> None:
    failing, other = pair(aborts_after=3 if failure == "hands over" else None)
    failing.damaged_after = 3 if failure == "sends damage" else None
    async with fleet(failing, other) as scene:
        scene.pool._homes.remember(["episode"], scene.known(failing).target)
        reader = ReadAlong({}, {})
        async with scene.engine.stream(asked(), ["episode"]) as stream:
            reading = asyncio.create_task(reader.read(stream))
            await scene.time.until(lambda: all(reader.ids.get(index) for index in range(4)))
            before = {index: len(ids) for index, ids in reader.ids.items()}
            if failure == "dies":
                await scene.cables[0].cut()
            response = await scene.time.result(reading)
        assert_whole(response, versions=(0, 1))
        assert all(0 < count < TOKENS for count in before.values()), "it read while tokens were sampled"
        assert [reader.ids[index] for index in range(4)] == [list(each.token_ids) for each in response.samples]
        assert [reader.text[index] for index in range(4)] == [each.text for each in response.samples]
        assert list(reader.opening.prompt_token_ids) == PROMPT
        assert reader.opening.request_id == "r"
        assert all(each.continued_tokens for each in other.requests), "what was read is kept, also of a damaged stream"


@pytest.mark.parametrize("failure", ["dies", "hands over"])
async def test_the_message_of_a_turn_that_two_replicas_sampled_is_that_of_all_its_tokens(failure: str) -> None:
    failing, other = pair(aborts_after=3 if failure == "hands over" else None)
    async with fleet(failing, other) as scene:
        scene.pool._homes.remember(["episode"], scene.known(failing).target)
        request = rollout_pb2.GenerateRequest(
            request_id="r",
            conversation={"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "search"}]},
            continues={"token_ids": PROMPT[:1], "messages": 1},
            sampling={"max_tokens": TOKENS, "seed": 5},
            return_text=True,
            return_message=True,
        )
        read: list[rollout_pb2.GeneratedSample] = []
        told: list[str] = []

        async def read_along(stream: TokenStream) -> None:
            async for message in stream:
                read.extend(delta.tokens for delta in message.chunk.deltas)
                told.extend(delta.content for delta in message.chunk.deltas)

        async with scene.engine.stream(request, ["episode"]) as stream:
            reading = asyncio.create_task(read_along(stream))
            await scene.time.until(lambda: read)
            assert told[0], "the text comes with its tokens"
            if failure == "dies":
                await scene.cables[0].cut()
            await scene.time.result(reading)
        assert_whole(stream.response, n=1, versions=(0, 1))
        assert stream.response.continued
        (sample,) = stream.response.samples
        assert (sample.message.content, [each.name for each in sample.message.tool_calls]) == (sample.text, ["search"])
        assert read[-1].message == sample.message
        assert "".join(told) == sample.message.content, "nothing twice, nothing left out"
        (continuation,) = other.requests
        assert list(continuation.rendered.ids) == [*PROMPT, *sample.token_ids[: continuation.continued_tokens]]


async def test_a_client_sees_that_it_is_alive_while_no_replica_takes_its_request() -> None:
    only = replica("only", state=rollout_pb2.REPLICA_STATE_STARTING)
    async with fleet(only, announced=True) as scene:
        reader = ReadAlong({}, {})
        async with scene.engine.stream(asked(), alive_s=1.0) as stream:
            reading = asyncio.create_task(reader.read(stream))
            await scene.time.until(lambda: reader.signs_of_life > 2)
            assert not reader.ids
            only.state = rollout_pb2.REPLICA_STATE_SERVING
            scene.announce("only", f"127.0.0.1:{scene.cables[0].port}")
            assert_whole(await scene.time.result(reading))


async def test_a_client_that_leaves_ends_its_request() -> None:
    only = replica("only")
    async with fleet(only) as scene:
        reader = ReadAlong({}, {})
        async with scene.engine.stream(asked()) as stream:
            reading = asyncio.create_task(reader.read(stream))
            await scene.time.until(lambda: reader.ids)
            reading.cancel()
            await asyncio.wait({reading})
        await until(lambda: not only.open)
        assert not any(each.works or each.in_flight for each in scene.pool.replicas)


async def test_a_client_is_told_why_its_request_failed() -> None:
    async with fleet(replica("only", damaged_after=0)) as scene, scene.engine.stream(asked()) as stream:
        with pytest.raises(SluiceError, match="interrupted 8 times in a row"):
            await scene.time.result(asyncio.create_task(ReadAlong({}, {}).read(stream)))
