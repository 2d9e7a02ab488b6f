"""How many samples a replica is given, against a simulated engine: places, a KV cache that may be too small, and preemption."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.sampling.concurrency import ConcurrencyLimit, EngineLoad
from sluice.sampling.config import ConcurrencyConfig
from sluice.sampling.placement import Load, place

STEP_S = 0.05
POLL_S = 0.5
FIXED_GROUPS = 64
"""Groups at a time before the limit adapted."""


@dataclass
class SimulatedEngine:
    """Samples one token per step and place, with a KV cache of so many tokens; a preempted sample is computed again, slowly."""

    places: int
    kv_tokens: int
    prompt: int = 64
    prefill: int = 512  # tokens of prompts per step
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    waiting: deque = field(default_factory=deque)
    running: list = field(default_factory=list)
    preemptions: int = 0
    tokens: int = 0
    groups: dict = field(default_factory=dict)

    def submit(self, group: int, samples: int) -> None:
        self.groups[group] = samples
        for _ in range(samples):
            length = max(8, min(600, int(self.rng.lognormvariate(4.6, 0.7))))
            self.waiting.append([group, length, 0, self.prompt])  # group, length, done, tokens to compute again

    @property
    def used(self) -> int:
        return sum(self.prompt + done for _, _, done, _ in self.running)

    def step(self) -> None:
        while self.waiting and len(self.running) < self.places:
            if self.used + self.prompt + self.waiting[0][2] > self.kv_tokens:
                break
            self.running.append(self.waiting.popleft())
        uncomputed = [sample for sample in self.running if sample[3]]
        if uncomputed:  # prompts go first, and the others wait a step
            uncomputed[0][3] = max(0, uncomputed[0][3] - self.prefill)
            return
        while self.used + len(self.running) > self.kv_tokens and len(self.running) > 1:
            victim = self.running.pop()
            victim[3] = self.prompt + victim[2]
            self.waiting.appendleft(victim)
            self.preemptions += 1
        for sample in list(self.running):
            sample[2] += 1
            self.tokens += 1
            if sample[2] == sample[1]:
                self.running.remove(sample)
                self.groups[sample[0]] -= 1
                if not self.groups[sample[0]]:
                    del self.groups[sample[0]]

    def load(self) -> EngineLoad:
        return EngineLoad(
            len(self.running), len(self.waiting), self.used / self.kv_tokens, self.preemptions, self.places
        )


def simulate(engine: SimulatedEngine, group: int, *, adapt: bool, seconds: float, scoring_s: float = 0.0) -> list[int]:
    """Keep the number of groups in progress that the limit allows; return the limit in samples at each poll."""
    config = ConcurrencyConfig(adapt=adapt, initial_samples=FIXED_GROUPS * group, most_samples=FIXED_GROUPS * group)
    limit, limits = ConcurrencyLimit(config, group), []
    number, next_poll, scoring = 0, POLL_S, deque()
    limit.report(engine.load(), 0, 0.0, held_back=False)  # a replica is polled before it gets work
    for step in range(int(seconds / STEP_S)):
        now = step * STEP_S
        before = set(engine.groups)
        engine.step()
        scoring.extend((now + scoring_s) for _ in before - set(engine.groups))
        while scoring and scoring[0] <= now:
            scoring.popleft()
        held_back = False
        while not held_back:
            held_back = len(engine.groups) + len(scoring) >= max(1, min(FIXED_GROUPS, limit.samples // group))
            if not held_back:
                engine.submit(number, group)
                number += 1
        if now >= next_poll:
            limit.report(engine.load(), len(engine.groups) * group, now, held_back=held_back)
            limits.append(limit.samples)
            next_poll = now + POLL_S
    return limits


ENGINES = {
    "few places": {"places": 8, "kv_tokens": 100_000},
    "many places": {"places": 64, "kv_tokens": 100_000},
    "small cache": {"places": 64, "kv_tokens": 4_000},
    "tiny cache": {"places": 32, "kv_tokens": 1_500},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scoring_s", [0.0, 3.0])
def test_it_samples_as_much_as_the_fixed_limit_and_settles_with_a_short_queue(engine: str, scoring_s: float) -> None:
    sampled = {}
    for adapt in (False, True):
        simulated = SimulatedEngine(**ENGINES[engine])
        limits = simulate(simulated, 8, adapt=adapt, seconds=150.0, scoring_s=scoring_s)
        sampled[adapt] = simulated
    assert sampled[True].tokens >= 0.995 * sampled[False].tokens
    assert sampled[True].preemptions <= sampled[False].preemptions
    late = limits[len(limits) // 2 :]
    assert min(late) >= 8
    assert max(late) <= 2.5 * min(late), "a saw with small teeth at most"
    assert max(late) < FIXED_GROUPS * 8 / 2


def test_it_grows_while_groups_are_held_back_by_slow_scoring() -> None:
    simulated = SimulatedEngine(places=64, kv_tokens=100_000)
    config = ConcurrencyConfig(initial_samples=8, most_samples=4096)
    limit = ConcurrencyLimit(config, 8)
    for tick in range(200):
        limit.report(simulated.load(), 4, tick * POLL_S, held_back=True)
    assert limit.samples == 4096
    before = limit.samples
    limit.report(simulated.load(), 4, 101.0, held_back=False)
    assert limit.samples == before, "nothing shows that more would help"


def test_it_grows_by_time_and_not_by_how_often_the_replica_is_asked() -> None:
    """Replicas are polled fifty times a second while a newer version is awaited."""
    limit = ConcurrencyLimit(ConcurrencyConfig(initial_samples=64), 8)
    for tick in range(50):
        limit.report(EngineLoad(32, 0, 0.1, 0, 0), 64, tick * 0.02, held_back=True)
    assert limit.samples == 64 + 2 * 8


def test_a_replica_that_does_well_with_more_than_its_limit_gets_a_higher_one() -> None:
    """It was given more since no other serves the version."""
    limit = ConcurrencyLimit(ConcurrencyConfig(initial_samples=64), 8)
    for tick in range(100):
        limit.report(EngineLoad(200, 0, 0.1, 0, 0), 200, tick * POLL_S, held_back=False)
    assert 200 - 8 <= limit.samples <= 200 + 16


def test_each_replica_of_two_gets_what_it_can_take() -> None:
    """One has a cache that is too small for its places; its limit falls, and the other one takes more."""
    group, groups = 8, 0
    engines = {"small cache": SimulatedEngine(64, 3_000), "large cache": SimulatedEngine(64, 100_000)}
    limits = {name: ConcurrencyLimit(ConcurrencyConfig(), group) for name in engines}
    late: dict[str, list[int]] = {name: [] for name in engines}
    for name, engine in engines.items():
        limits[name].report(engine.load(), 0, 0.0, held_back=False)
    for step in range(int(120 / STEP_S)):
        in_flight = {name: len(engine.groups) * group for name, engine in engines.items()}
        while sum(in_flight.values()) // group < sum(limit.samples for limit in limits.values()) // group:
            loads = [Load(name, in_flight[name], limits[name].samples) for name in engines]
            name = place(loads, "", 0.25)
            engines[name].submit(groups, group)
            groups, in_flight[name] = groups + 1, in_flight[name] + group
        for engine in engines.values():
            engine.step()
        if step % int(POLL_S / STEP_S) == 0:
            for name, engine in engines.items():
                limits[name].report(engine.load(), in_flight[name], step * STEP_S, held_back=True)
                late[name].append(in_flight[name])
    half = len(late["small cache"]) // 2
    assert max(late["small cache"][half:]) < min(late["large cache"][half:])
    assert max(late["small cache"][half:]) <= 64, "it began with twice its places and a reserve: 160"


def test_a_burst_of_a_moment_is_no_standing_queue() -> None:
    limit = ConcurrencyLimit(ConcurrencyConfig(initial_samples=512), 8)
    for tick in range(100):
        queued = 400 if tick % 3 else 0
        limit.report(EngineLoad(64, queued, 0.3, 0, 64), 150, tick * POLL_S, held_back=False)
    assert limit.samples == 2 * 64 + 32, "twice its places, and the reserve"


def test_without_adaptation_it_is_no_limit() -> None:
    limit = ConcurrencyLimit(ConcurrencyConfig(adapt=False), 8)
    limit.report(EngineLoad(8, 5000, 1.0, 0, 8), 5000, 0.0, held_back=False)
    limit.refused(5000, 1.0)
    assert limit.samples > 1 << 60


def test_a_full_queue_at_the_replica_reduces_it() -> None:
    limit = ConcurrencyLimit(ConcurrencyConfig(initial_samples=512), 8)
    limit.refused(in_flight=200, now=1.0)
    limit.refused(in_flight=200, now=1.1)
    assert limit.samples == 180


def test_an_engine_that_only_computes_preempted_samples_again_gets_fewer() -> None:
    limit = ConcurrencyLimit(ConcurrencyConfig(initial_samples=64), 8)
    for tick in range(20):
        limit.report(EngineLoad(10, 0, 1.0, 20 * tick, 0), limit.samples, tick * POLL_S, held_back=True)
    assert limit.samples < 32


@given(
    st.integers(1, 64),
    st.lists(
        st.tuples(st.integers(0, 5000), st.floats(0, 1), st.integers(0, 50), st.integers(0, 512), st.booleans()),
        max_size=80,
    ),
)
def test_it_obeys_its_bounds_and_never_starves(group: int, reports: list) -> None:
    limit = ConcurrencyLimit(ConcurrencyConfig(initial_samples=300, most_samples=1000), group)
    for tick, (queued, usage, preemptions, places, held_back) in enumerate(reports):
        limit.report(
            EngineLoad(places, queued, usage, preemptions, places), queued + places, tick * POLL_S, held_back=held_back
        )
        assert group <= limit.samples <= max(group, 1000)


def test_a_bound_that_is_lowered_while_the_run_lives_holds_at_once() -> None:
    config = ConcurrencyConfig(initial_samples=512)
    limit = ConcurrencyLimit(config, group=8)
    config.most_samples = 64
    assert limit.samples == 64
    config.most_samples = 4096
    assert limit.samples == 512, "it grows again by what the replica reports"
    config.most_samples = 1
    assert limit.samples == 8, "one group can always run"
