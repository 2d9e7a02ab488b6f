"""The choice of tasks: mix, pools, rates, quarantine, and the same state again from facts and notes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator_svc.config import EnvironmentConfig
from orchestrator_svc.curriculum import POOLS, Curriculum, Shares, StartRate, TaskStream
from orchestrator_svc.envs.base import Task


def tasks(count: int, prefix: str = "t") -> list[Task]:
    return [Task(f"{prefix}{number}") for number in range(count)]


def environment(name: str = "a", **settings) -> EnvironmentConfig:
    return EnvironmentConfig(name=name, environment=f"envs:{name}", **settings)


def curriculum(*environments: EnvironmentConfig, count: int = 5, seed: int = 0) -> Curriculum:
    return Curriculum([(each, tasks(count, each.name)) for each in environments], seed)


def draw(chosen: Curriculum, now: float = 0.0):
    """Draw one task, or return None."""
    found = chosen.choose(now)
    if found is not None:
        chosen.drawn(found, now)
    return found


def end(chosen: Curriculum, drawn, *rewards: float) -> None:
    chosen.ended(drawn.environment, drawn.task_id, rewards or (0.0, 1.0), accepted=True)


ratios = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(ratios, st.integers(1, 200))
def test_every_prefix_of_places_is_within_one_of_the_wanted_shares(weights, places) -> None:
    shares = Shares({str(index): float(weight) for index, weight in enumerate(weights)})
    names, given_to = list(shares.credits), dict.fromkeys(shares.credits, 0)
    for place in range(1, places + 1):
        name = shares.choose(names)
        shares.give(name, names)
        given_to[name] += 1
        assert all(abs(shares.share(each) * place - given_to[each]) < 1 + 1e-6 for each in names)


@given(ratios, st.data())
def test_a_name_that_cannot_take_its_place_loses_the_share_and_claims_nothing_later(weights, data) -> None:
    shares = Shares({str(index): float(weight) for index, weight in enumerate(weights)})
    names = list(shares.credits)
    for _ in range(data.draw(st.integers(0, 40))):
        able = data.draw(st.lists(st.sampled_from(names), unique=True))
        chosen = shares.choose(able)
        assert (chosen is None) == (not able)
        before = dict(shares.credits)
        if chosen is not None:
            shares.give(chosen, able)
        assert not able or all(shares.credits[each] == min(0, before[each]) for each in names if each not in able)
        assert abs(sum(shares.credits.values())) < 1e-6
        assert -1 - 1e-6 < min(shares.credits.values()) <= max(shares.credits.values()) < len(names)


def test_two_environments_at_three_to_one() -> None:
    chosen = curriculum(environment("a", ratio=3), environment("b", ratio=1))
    drawn = "".join(draw(chosen).environment for _ in range(16))
    assert drawn.count("a") == 12
    assert "bb" not in drawn
    assert chosen.share("a") == 0.75


def test_a_changed_ratio_holds_for_the_draws_that_follow() -> None:
    chosen = curriculum(environment("a"), environment("b"))
    for _ in range(10):
        draw(chosen)
    chosen.want("b", 9.0)
    assert [draw(chosen).environment for _ in range(20)].count("b") in {17, 18, 19}
    with pytest.raises(KeyError):
        chosen.want("c", 1.0)


def test_every_task_comes_once_per_pass_and_each_pass_has_another_order() -> None:
    chosen = curriculum(environment("a"), count=20)
    passes = [[draw(chosen).task_id for _ in range(20)] for _ in range(3)]
    assert all(sorted(each) == sorted(passes[0]) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    other = curriculum(environment("a"), count=20, seed=1)
    assert [draw(other).task_id for _ in range(20)] != passes[0]


def test_a_task_drawn_again_comes_first_and_is_not_charged_to_the_mix() -> None:
    chosen = curriculum(environment("a"), environment("b"))
    first = draw(chosen)
    end(chosen, first)
    chosen.draw_again(first.environment, first.task_id, "STALE")
    again = draw(chosen)
    assert (again.task_id, again.reason, again.draw) == (first.task_id, "STALE", 1)
    assert [draw(chosen).environment for _ in range(3)] == ["b", "a", "b"]


def test_a_group_without_signal_is_replaced_from_its_own_environment_at_once() -> None:
    chosen = curriculum(environment("a", ratio=1), environment("b", ratio=9))
    first = draw(chosen)
    while first.environment != "a":
        first = draw(chosen)
    chosen.ended("a", first.task_id, (1.0, 1.0), accepted=False)
    chosen.refill("a")
    replacement = draw(chosen)
    assert (replacement.environment, replacement.reason) == ("a", "NO_SIGNAL")
    assert replacement.task_id != first.task_id
    assert (chosen.counts("a").refilled, chosen.refills) == (1, 1)
    chosen.batch_made()
    assert chosen.refills == 0
    assert draw(chosen).environment == "b"


def test_a_task_whose_groups_fail_is_put_in_quarantine_and_the_others_are_drawn() -> None:
    chosen = curriculum(environment("a", quarantine_after=2), count=3)
    bad = "a1"
    for _ in range(12):
        drawn = draw(chosen)
        if drawn.task_id != bad:
            end(chosen, drawn)
        elif failures := chosen.failed("a", bad, fault=True):
            chosen.quarantine("a", bad, failures, "it died")
    assert list(chosen.stream("a").quarantined) == [bad]
    assert chosen.stream("a").progress[bad].draws == 2
    assert chosen.stream("a").quarantined[bad].problem == "it died"
    assert sum(chosen.stream("a").sizes().values()) == 2
    assert not chosen.exhausted


def test_a_failure_that_is_no_fault_of_the_task_does_not_count_against_it() -> None:
    chosen = curriculum(environment("a", quarantine_after=1), count=1)
    for _ in range(5):
        drawn = draw(chosen)
        assert chosen.failed("a", drawn.task_id, fault=False) is None
    assert chosen.counts("a").failed == 5


def test_a_success_in_between_ends_the_count_of_failures() -> None:
    chosen = curriculum(environment("a", quarantine_after=2), count=1)
    for _ in range(4):
        assert chosen.failed("a", draw(chosen).task_id, fault=True) is None
        end(chosen, draw(chosen))


@pytest.mark.parametrize("pools", [False, True])
def test_an_environment_whose_tasks_are_all_in_quarantine_passes_its_share_on(pools) -> None:
    chosen = curriculum(environment("a", pools={"enabled": pools}), environment("b"), count=2)
    for task in ("a0", "a1"):
        chosen.quarantine("a", task, 3, "broken")
    drawn = [draw(chosen) for _ in range(4)]
    assert {each.environment for each in drawn} == {"b"}
    assert chosen.counts("a").passed_on == pytest.approx(2.0)
    for task in ("b0", "b1"):
        chosen.quarantine("b", task, 3, "broken")
    assert chosen.exhausted
    assert chosen.choose(0.0) is None


def test_a_bucket_starts_so_many_groups_per_second() -> None:
    rate = StartRate(2.0)
    started = []
    now = 100.0
    while now < 110.0:
        if wait := rate.wait_s(now):
            now += wait
            continue
        rate.start(now)
        started.append(now)
    assert len(started) in {21, 22}  # a second's worth at once, then two per second
    assert StartRate(None).wait_s(0.0) == 0.0


def test_a_limited_environment_passes_its_share_on_and_says_when_it_can_deliver_again() -> None:
    chosen = curriculum(environment("slow", groups_per_s=0.5), environment("fast"))
    drawn = [draw(chosen, now=10.0).environment for _ in range(9)]
    assert drawn.count("slow") == 1
    assert chosen.wait_s(10.0) == pytest.approx(2.0)
    assert chosen.counts("slow").passed_on == pytest.approx(3.5, abs=1.1)
    following = [draw(chosen, now=12.0).environment for _ in range(4)]
    assert following.count("slow") == 1  # what it missed is gone


def test_an_environment_runs_so_many_groups_at_a_time() -> None:
    chosen = curriculum(environment("a", max_running=2))
    first, _ = draw(chosen), draw(chosen)
    assert chosen.choose(0.0) is None
    assert chosen.wait_s(0.0) is None
    end(chosen, first)
    assert chosen.choose(0.0) is not None


def test_tasks_come_by_pool_in_the_wanted_shares() -> None:
    shares = {"new": 1, "easy": 1, "medium": 6, "hard": 2}
    chosen = curriculum(environment("a", pools={"enabled": True, "shares": shares}), count=40)
    solved = {f"a{number}": number % 4 for number in range(40)}  # 0: never, 1 and 2: sometimes, 3: always
    rewards = {0: (0.0, 0.0), 1: (0.0, 1.0), 2: (0.0, 1.0), 3: (1.0, 1.0)}
    for _ in range(400):
        drawn = draw(chosen)
        end(chosen, drawn, *rewards[solved[drawn.task_id]])
    stream = chosen.stream("a")
    assert stream.sizes() == {"new": 0, "easy": 10, "medium": 20, "hard": 10}
    had = chosen.counts("a").by_pool
    assert had["new"] == 40
    rest = {name: had[name] / 360 for name in ("easy", "medium", "hard")}
    assert rest == pytest.approx({"easy": 1 / 9, "medium": 6 / 9, "hard": 2 / 9}, abs=0.06)
    draws = [stream.progress[name].draws for name in solved if solved[name] == 3]
    assert max(draws) - min(draws) <= 1, "within a pool the least drawn comes first"


def test_a_solve_rate_moves_with_the_newest_groups() -> None:
    stream = TaskStream(tasks(1), environment(pools={"enabled": True, "newest_weight": 0.5}).pools, 0)
    for share, rate, pool in ((1.0, 1.0, "easy"), (0.0, 0.5, "medium"), (0.0, 0.25, "medium"), (0.0, 0.125, "medium")):
        stream.drawn("t0", 0, in_turn=True)
        stream.ended("t0", share)
        assert stream.progress["t0"].solve_rate == rate
        assert stream.pool("t0") == pool
    stream.drawn("t0", 0, in_turn=True)
    stream.ended("t0", 0.0)
    assert stream.pool("t0") == "hard"
    stream.drawn("t0", 0, in_turn=True)
    stream.ended("t0", None)  # no reward says nothing
    assert stream.pool("t0") == "hard"


def test_more_groups_than_tasks_run_tasks_twice_at_a_time() -> None:
    chosen = curriculum(environment("a", pools={"enabled": True}), count=3)
    drawn = [draw(chosen).task_id for _ in range(7)]
    assert sorted(drawn.count(name) for name in set(drawn)) == [2, 2, 3]


def live_on(lived: Curriculum, heard: Curriculum, rng: random.Random, steps: int) -> float:
    """Draw and end groups by chance; tell both what became true, and the time to one alone. Return the time."""
    running, now = [], 0.0
    for _ in range(steps):
        now += rng.random() / 2
        found = lived.choose(now)
        if found is not None and (rng.random() < 0.5 or not running):
            lived.drawn(found, now)
            heard.drawn(found)
            running.append(found)
        elif running:
            ended, fate = running.pop(rng.randrange(len(running))), rng.random()
            rewards = (rng.choice((0.0, 1.0)), 1.0)
            for each in (lived, heard):
                become(each, ended, fate, rewards)
    return now


def become(chosen: Curriculum, ended, fate: float, rewards: tuple[float, ...]) -> None:
    where = (ended.environment, ended.task_id)
    if fate < 0.2:
        if failures := chosen.failed(*where, fault=True):
            chosen.quarantine(*where, failures, "broken")
        return
    chosen.ended(*where, rewards, accepted=fate > 0.4)
    if fate < 0.4:
        chosen.refill(ended.environment)
    elif fate < 0.6:
        chosen.draw_again(*where, "STALE")


@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 120))
def test_the_same_facts_give_the_same_state_and_the_same_next_draws(seed, pools, steps) -> None:
    settings = (
        environment("a", ratio=3, pools={"enabled": pools}, groups_per_s=3.0, quarantine_after=2),
        environment("b", ratio=1, max_running=4),
    )
    lived, heard = curriculum(*settings), curriculum(*settings)
    later = live_on(lived, heard, random.Random(seed), steps) + 1000.0
    assert heard.noted() == lived.noted()
    noted = lived.noted()
    lived.restore(noted)
    heard.restore(noted)
    for _ in range(10):
        assert draw(lived, later) == draw(heard, later)
        later += 1.0


def test_a_note_brings_pools_and_credits_back() -> None:
    settings = (environment("a", ratio=2, pools={"enabled": True}), environment("b"))
    lived = curriculum(*settings)
    for _ in range(7):
        end(lived, draw(lived), 1.0, 0.0)
    other = curriculum(*settings)
    other.restore(lived.noted())
    assert other.noted() == lived.noted()
    assert other.stream("a").sizes() == lived.stream("a").sizes()
    assert set(other.stream("a").sizes()) == set(POOLS)


def test_facts_of_what_no_longer_exists_are_passed_over() -> None:
    lived = curriculum(environment("a"), environment("gone"))
    facts = [draw(lived) for _ in range(4)]
    now = curriculum(environment("a"), count=1)
    for each in facts:
        now.drawn(each)
        now.draw_again(each.environment, each.task_id, "STALE")
    assert now.task("gone", "gone0") is None
    assert now.task("a", "a4") is None
    assert draw(now).task_id == "a0"


def test_tasks_without_ids_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="two tasks of the split 'train' have the id 't'"):
        Curriculum([(environment(), [Task("t"), Task("t")])], 0)
    with pytest.raises(ValueError, match="the split 'train' has no tasks"):
        Curriculum([(environment(), [])], 0)
