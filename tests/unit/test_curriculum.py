"""The choice of tasks: mix, pools, rates, quarantine, and the same state again from facts and notes."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from orchestrator_svc.config import EnvironmentConfig
from orchestrator_svc.journal.facts import Redraw
from orchestrator_svc.run.curriculum import Curriculum, Draw, StartRate, overlong_counter, tasks_to_release
from orchestrator_svc.run.task_stream import POOLS, Shares, TaskStream
from sluice.environments.base import Task
from sluice.rpc import SluiceError
from sluice.v1 import journal_pb2 as pb


def tasks(count: int, prefix: str = "t") -> list[Task]:
    return [Task(f"{prefix}{number}") for number in range(count)]


def environment(name: str = "a", **settings) -> EnvironmentConfig:
    return EnvironmentConfig(name=name, environment=f"envs:{name}", **settings)


def curriculum(*environments: EnvironmentConfig, count: int = 5, seed: int = 0) -> Curriculum:
    return Curriculum([(each, tasks(count, each.name)) for each in environments], seed)


class World:
    """Records facts as a run does: draws tasks and ends their groups."""

    def __init__(self, *settings: EnvironmentConfig, count: int = 5, seed: int = 0) -> None:
        self.curriculum = curriculum(*settings, count=count, seed=seed)
        self.facts: list[pb.Fact] = []
        self.redraws: list[Redraw] = []
        self.groups = 0

    def record(self, **kind) -> None:
        self.facts.append(pb.Fact(**kind))
        self.curriculum.apply_fact(self.facts[-1])

    def draw(self, now: float = 0.0) -> Group | None:
        found = self.curriculum.choose_task(now, self.redraws)
        if found is None:
            return None
        self.groups += 1
        self.record(
            task_drawn=pb.TaskDrawn(
                environment=found.environment,
                task_id=found.task_id,
                draw=found.draw,
                group=self.groups,
                position=found.position,
                redraw_reason=found.reason,
                passed_over=found.passed_over,
            )
        )
        self.curriculum.start(found.environment, now)
        if found.reason not in ("", "NO_SIGNAL"):
            self.redraws.pop(0)
        return Group(self.groups, found)

    def accept(self, group: Group, *rewards: float) -> None:
        self.score(group, *(rewards or (0.0, 1.0)))
        self.record(group_accepted=pb.GroupAccepted(group=group.number))

    def score(self, group: Group, *rewards: float) -> None:
        ended = [pb.EndedEpisode(episode=index, reward=each) for index, each in enumerate(rewards)]
        self.record(episodes_ended=pb.EpisodesEnded(group=group.number, episodes=ended))

    def drop(self, group: Group, reason: str) -> None:
        failures = self.curriculum.to_quarantine(group.number, reason)
        self.record(group_dropped=pb.GroupDropped(group=group.number, reason=reason))
        if failures:
            self.quarantine(group.draw.environment, group.draw.task_id, failures)

    def quarantine(self, environment: str, task_id: str, failures: int = 3) -> None:
        noted = pb.TaskQuarantined(environment=environment, task_id=task_id, failures=failures, problem="it died")
        self.record(task_quarantined=noted)

    def draw_again(self, group: Group) -> None:
        self.redraws.append(Redraw(group.draw.environment, group.draw.task_id, group.draw.position, "STALE"))


class Group(NamedTuple):
    number: int
    draw: Draw


ratios = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@settings(max_examples=60)
@given(ratios, st.integers(1, 200))
def test_every_prefix_of_places_is_within_one_of_the_wanted_shares(weights, places) -> None:
    shares = Shares({str(index): float(weight) for index, weight in enumerate(weights)})
    names, given_to = list(shares.credits), dict.fromkeys(shares.credits, 0)
    for place in range(1, places + 1):
        name = shares.choose(names)
        shares.give(name, names)
        given_to[name] += 1
        assert all(abs(shares.share(each) * place - given_to[each]) < 1 + 1e-6 for each in names)


@pytest.mark.slow
@settings(max_examples=60)
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
        kept = {each: min(0, before[each]) for each in names if each not in able}
        assert not able or kept.items() <= shares.credits.items() or not any(shares.credits.values())
        assert abs(sum(shares.credits.values())) < 1e-6
        assert -1 - 1e-6 < min(shares.credits.values()) <= max(shares.credits.values()) < len(names)


def test_two_environments_at_three_to_one() -> None:
    world = World(environment("a", ratio=3), environment("b", ratio=1))
    drawn = "".join(world.draw().draw.environment for _ in range(16))
    assert drawn.count("a") == 12
    assert "bb" not in drawn
    assert world.curriculum.share("a") == 0.75


def test_a_changed_ratio_holds_for_the_draws_that_follow() -> None:
    world = World(environment("a"), environment("b"))
    for _ in range(10):
        world.draw()
    world.curriculum.environments["b"].ratio = 9.0
    assert [world.draw().draw.environment for _ in range(20)].count("b") in {17, 18, 19}


def test_a_start_draws_on_under_the_ratio_that_was_set_while_the_run_lived() -> None:
    lived, started = (World(environment("a", ratio=3), environment("b")) for _ in range(2))
    for _ in range(7):
        lived.draw()
    changed = pb.SettingChanged(key="orchestrator.environments.b.ratio", old_value="1.0", new_value="8.0")
    lived.record(setting_changed=changed)
    for _ in range(6):
        lived.draw()
    for fact in lived.facts:
        started.curriculum.apply_fact(fact)
    assert started.curriculum.share("b") == 8 / 11
    assert started.curriculum.noted() == lived.curriculum.noted()


def test_a_start_under_another_ratio_owes_nobody_what_the_old_one_gave() -> None:
    lived = World(environment("a", ratio=9), environment("b"))
    started = World(environment("a"), environment("b"))
    for _ in range(100):
        lived.accept(lived.draw())
    for fact in lived.facts:
        started.curriculum.apply_fact(fact)
    assert [started.draw().draw.environment for _ in range(20)].count("b") in {9, 10, 11}


def test_every_task_comes_once_per_pass_and_each_pass_has_another_order() -> None:
    world = World(environment("a"), count=20)
    passes = [[world.draw().draw.task_id for _ in range(20)] for _ in range(3)]
    assert all(sorted(each) == sorted(passes[0]) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    other = World(environment("a"), count=20, seed=1)
    assert [other.draw().draw.task_id for _ in range(20)] != passes[0]


def test_a_task_drawn_again_comes_first_and_is_not_charged_to_the_mix() -> None:
    world = World(environment("a"), environment("b"))
    first = world.draw()
    world.accept(first)
    world.draw_again(first)
    again = world.draw().draw
    assert (again.task_id, again.position, again.reason, again.draw) == (first.draw.task_id, 0, "STALE", 1)
    assert [world.draw().draw.environment for _ in range(3)] == ["b", "a", "b"]


def test_a_group_without_signal_is_replaced_from_its_own_environment_at_once() -> None:
    world = World(environment("a", ratio=1), environment("b", ratio=9))
    first = world.draw()
    while first.draw.environment != "a":
        first = world.draw()
    world.score(first, 1.0, 1.0)
    world.drop(first, "NO_SIGNAL")
    replacement = world.draw().draw
    assert (replacement.environment, replacement.reason) == ("a", "NO_SIGNAL")
    assert replacement.task_id != first.draw.task_id
    assert (world.curriculum.counts("a").refilled, world.curriculum.refills) == (1, 1)
    world.record(batch_made=pb.BatchMade(sequence_no=1))
    assert world.curriculum.refills == 0
    assert world.draw().draw.environment == "b"


def test_a_task_whose_groups_fail_is_put_in_quarantine_and_the_others_are_drawn() -> None:
    world = World(environment("a", quarantine_after=2), count=3)
    for _ in range(12):
        group = world.draw()
        if group.draw.task_id == "a1":
            world.drop(group, "ENVIRONMENT_DIED")
        else:
            world.accept(group)
    stream = world.curriculum.stream("a")
    assert list(stream.quarantined) == ["a1"]
    assert stream.progress["a1"].draws == 2
    assert (stream.quarantined["a1"].failures, stream.quarantined["a1"].problem) == (2, "it died")
    assert sum(stream.sizes().values()) == 2
    assert not world.curriculum.exhausted


def test_a_failure_that_is_no_fault_of_the_task_does_not_count_against_it() -> None:
    world = World(environment("a", quarantine_after=1), count=1)
    for _ in range(5):
        world.drop(world.draw(), "EPISODE_FAILED")
    assert world.curriculum.counts("a").failed == 5
    assert not world.curriculum.exhausted


def test_a_success_in_between_ends_the_count_of_failures() -> None:
    world = World(environment("a", quarantine_after=2), count=1)
    for _ in range(4):
        world.drop(world.draw(), "EPISODE_DEADLINE")
        world.accept(world.draw())
    assert not world.curriculum.exhausted


def test_a_group_that_a_restart_runs_again_counts_once() -> None:
    world = World(environment("a"))
    group = world.draw()
    world.score(group, 0.0)
    world.record(task_drawn=pb.TaskDrawn(environment="a", task_id=group.draw.task_id, group=group.number, attempt=1))
    world.accept(group, 1.0, 1.0)
    assert world.curriculum.counts("a").groups == 1
    assert world.curriculum.stream("a").progress[group.draw.task_id].solve_rate == 1.0


@pytest.mark.parametrize("pools", [False, True])
def test_an_environment_whose_tasks_are_all_in_quarantine_passes_its_share_on(pools) -> None:
    world = World(environment("a", pools={"enabled": pools}), environment("b"), count=2)
    for task in ("a0", "a1"):
        world.quarantine("a", task)
    assert {world.draw().draw.environment for _ in range(4)} == {"b"}
    assert world.curriculum.counts("a").passed_on == pytest.approx(2.0)
    for task in ("b0", "b1"):
        world.quarantine("b", task)
    assert world.curriculum.exhausted
    assert world.curriculum.choose_task(0.0) is None


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
    world = World(environment("slow", groups_per_s=0.5), environment("fast"))
    drawn = [world.draw(now=10.0).draw.environment for _ in range(9)]
    assert drawn.count("slow") == 1
    assert world.curriculum.wait_s(10.0) == pytest.approx(2.0)
    assert world.curriculum.counts("slow").passed_on == pytest.approx(3.5, abs=1.1)
    following = [world.draw(now=12.0).draw.environment for _ in range(4)]
    assert following.count("slow") == 1  # the turns that it missed are lost


def test_an_environment_runs_so_many_groups_at_a_time() -> None:
    world = World(environment("a", max_running=2))
    first, _ = world.draw(), world.draw()
    assert world.curriculum.choose_task(0.0) is None
    assert world.curriculum.wait_s(0.0) is None
    world.accept(first)
    assert world.curriculum.choose_task(0.0) is not None


def test_tasks_come_by_pool_in_the_wanted_shares() -> None:
    shares = {"new": 1, "easy": 1, "medium": 6, "hard": 2}
    world = World(environment("a", pools={"enabled": True, "shares": shares}), count=40)
    kind = {f"a{number}": number % 4 for number in range(40)}
    rewards = ((0.0, 0.0), (0.0, 1.0), (0.0, 1.0), (1.0, 1.0))  # never solved, sometimes, sometimes, always
    for _ in range(400):
        group = world.draw()
        world.accept(group, *rewards[kind[group.draw.task_id]])
    stream = world.curriculum.stream("a")
    assert stream.sizes() == {"new": 0, "easy": 10, "medium": 20, "hard": 10}
    had = world.curriculum.counts("a").by_pool
    assert had["new"] == 40
    rest = {name: had[name] / 360 for name in ("easy", "medium", "hard")}
    assert rest == pytest.approx({"easy": 1 / 9, "medium": 6 / 9, "hard": 2 / 9}, abs=0.06)
    draws = [stream.progress[name].draws for name in kind if kind[name] == 3]
    assert max(draws) - min(draws) <= 1, "within a pool the least drawn comes first"


def test_a_solve_rate_moves_with_the_newest_groups() -> None:
    stream = TaskStream(tasks(1), 0, environment(pools={"enabled": True}).pools)
    for share, rate, pool in ((1.0, 1.0, "easy"), (0.0, 0.5, "medium"), (0.0, 0.25, "medium"), (0.0, 0.125, "medium")):
        stream.drawn("t0", 0, in_turn=True)
        stream.ended("t0", share)
        assert stream.progress["t0"].solve_rate == rate
        assert stream.pool("t0") == pool
    for share in (0.0, None):  # no reward says nothing
        stream.drawn("t0", 0, in_turn=True)
        stream.ended("t0", share)
        assert stream.pool("t0") == "hard"


def test_more_groups_than_tasks_run_tasks_twice_at_a_time() -> None:
    world = World(environment("a", pools={"enabled": True}), count=3)
    drawn = [world.draw().draw.task_id for _ in range(7)]
    assert sorted(drawn.count(name) for name in set(drawn)) == [2, 2, 3]


def live_on(world: World, rng: random.Random, steps: int) -> float:
    """Draw and end groups by chance; return the time."""
    running, now = [], 0.0
    for _ in range(steps):
        now += rng.random() / 2
        group = world.draw(now) if rng.random() < 0.5 or not running else None
        if group is not None:
            running.append(group)
        elif running:
            end(world, running.pop(rng.randrange(len(running))), rng.random(), (rng.choice((0.0, 1.0)), 1.0))
    return now


def end(world: World, group: Group, fate: float, rewards: tuple[float, ...]) -> None:
    if fate < 0.2:
        world.drop(group, "ENVIRONMENT_DIED")
        return
    world.score(group, *rewards)
    if fate < 0.4:
        world.drop(group, "NO_SIGNAL")
        return
    world.record(group_accepted=pb.GroupAccepted(group=group.number))
    if fate < 0.6:
        world.draw_again(group)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 120))
def test_a_start_that_reads_the_facts_draws_on_as_if_nothing_had_happened(seed, pools, steps) -> None:
    settings = (
        environment("a", ratio=3, pools={"enabled": pools}, groups_per_s=3.0, quarantine_after=2),
        environment("b", ratio=1, max_running=4),
    )
    lived, started = World(*settings), World(*settings)
    later = live_on(lived, random.Random(seed), steps) + 1000.0
    for fact in lived.facts:
        started.curriculum.apply_fact(pb.Fact.FromString(fact.SerializeToString()))
    assert started.curriculum.noted() == lived.curriculum.noted()
    started.redraws, started.groups = list(lived.redraws), lived.groups
    for each in (lived, started):
        each.record(curriculum_noted=lived.curriculum.noted())
    for _ in range(10):
        assert lived.draw(later) == started.draw(later)
        later += 1.0


def known(world: World) -> dict:
    """Return the state of each task in a note."""
    return {
        (name, task): (each.draws, each.solve_rate, each.failures)
        for name in world.curriculum.environments
        for task, each in world.curriculum.stream(name).progress.items()
    }


def test_notes_together_bring_pools_and_credits_back_and_each_names_only_what_changed() -> None:
    settings = (environment("a", ratio=2, pools={"enabled": True}), environment("b"))
    lived, other = World(*settings), World(*settings)
    for draws in (7, 2):
        for _ in range(draws):
            lived.accept(lived.draw(), 1.0, 0.0)
        lived.draw()  # a task that was only drawn is known too
        noted = lived.curriculum.noted()
        assert sum(len(each.tasks) for each in noted.environments) <= draws + 1
        for each in (lived, other):
            each.record(curriculum_noted=noted)
    assert known(other) == known(lived)
    assert other.curriculum.noted() == lived.curriculum.noted()
    assert not any(each.tasks for each in lived.curriculum.noted().environments), "nothing changed since"
    assert other.curriculum.stream("a").sizes() == lived.curriculum.stream("a").sizes()
    assert set(other.curriculum.stream("a").sizes()) == set(POOLS)


def test_a_note_is_due_before_it_grows_large() -> None:
    world = World(environment("a"), count=3000)
    sizes = []
    for _ in range(2500):
        world.accept(world.draw())
        if world.curriculum.note_is_due:
            sizes.append(world.curriculum.noted().ByteSize())
            world.record(curriculum_noted=world.curriculum.noted())
    assert len(sizes) == 2
    assert max(sizes) < 50_000


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 30))
def test_a_restart_in_the_middle_of_a_pass_doubles_and_loses_no_task(seed, pools, before) -> None:
    """Also tasks that were drawn and whose groups had not ended, and where a note was made among them."""
    rng, settings = random.Random(seed), environment("a", pools={"enabled": pools})
    world = World(settings, count=30)
    drawn = []
    for _ in range(before):
        group = world.draw()
        drawn.append(group.draw.task_id)
        if rng.random() < 0.5:
            world.accept(group, 0.0, 1.0) if not pools else world.drop(group, "EPISODE_FAILED")
        if rng.random() < 0.1:
            world.record(curriculum_noted=world.curriculum.noted())
    started = World(settings, count=30)
    for fact in world.facts:
        started.curriculum.apply_fact(fact)
    started.groups = world.groups
    drawn += [started.draw().draw.task_id for _ in range(30 - before)]
    assert sorted(drawn) == sorted(f"a{number}" for number in range(30))


def test_a_task_that_cannot_be_drawn_again_says_why() -> None:
    world = World(environment("a"))
    world.quarantine("a", "a1")
    owed = [Redraw("a", "a0", 0, "STALE"), Redraw("a", "a1", 1, "STALE"), Redraw("a", "gone", 2, "STALE")]
    assert [world.curriculum.why_not_again(each) for each in owed] == ["", "QUARANTINED", "TASK_CHANGED"]
    assert world.curriculum.why_not_again(Redraw("gone", "a0", 0, "STALE")) == "TASK_CHANGED"
    assert world.curriculum.choose_task(0.0, owed[1:]).reason == ""


def test_what_the_rule_for_long_episodes_did_is_counted_by_environment() -> None:
    world = World(environment("a.b"), environment("c"))
    grown = {overlong_counter("a.b", "mask"): 2, overlong_counter("gone", "mask"): 1, "tokens": 7}
    world.record(counts_noted=pb.CountsNoted(generated=grown))
    assert world.curriculum.counts("a.b").overlong == {"mask": 2}
    assert world.curriculum.counts("c").overlong == {}


def test_facts_of_what_no_longer_exists_are_passed_over() -> None:
    lived, now = World(environment("a"), environment("gone")), World(environment("a"), count=1)
    for _ in range(6):
        group = lived.draw()
        lived.draw_again(group)
        lived.accept(group)
    for fact in lived.facts:
        now.curriculum.apply_fact(fact)
    now.redraws = [each for each in lived.redraws if each.task_id != "a0"]
    assert now.curriculum.task("gone", "gone0", 0) is None
    assert now.curriculum.task("a", "a4", 0) is None
    assert now.draw().draw.task_id == "a0"


def test_tasks_without_ids_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="two tasks of the split 'train' have the id 't'"):
        Curriculum([(environment(), [Task("t"), Task("t")])], 0)
    with pytest.raises(ValueError, match="the split 'train' has no tasks"):
        Curriculum([(environment(), [])], 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 0}, "greater than 0"),
        ({"ratio": 1e308}, "less than or equal to 1000000"),
        ({"ratio": float("nan")}, "finite"),
        (
            {"pools": {"enabled": True, "shares": {"new": 0, "easy": 0, "medium": 0, "hard": 0}}},
            "no task could be drawn",
        ),
        ({"pools": {"easy_from": 0.1, "hard_to": 0.5}}, "must be below easy_from"),
        ({"filter": {"min_reward_mean": 0.9, "max_reward_mean": 0.1}}, "would replace every group"),
    ],
)
def test_settings_under_which_nothing_could_be_drawn_or_trained_are_refused(settings, message) -> None:
    with pytest.raises(ValidationError, match=message):
        environment("a", **settings)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 1.0]), st.lists(st.sampled_from(POOLS), min_size=1, unique=True))
def test_a_task_is_drawn_as_long_as_one_is_left_whatever_the_pools_hold(seed, reward, wanted) -> None:
    """Every task solved, or none; pools without a share; quarantine up to the last task."""
    rng, shares = random.Random(seed), {name: float(name in wanted) for name in POOLS}
    world = World(environment("a", pools={"enabled": True, "shares": shares}), environment("b"), count=4)
    left = [("a", f"a{number}") for number in range(4)] + [("b", f"b{number}") for number in range(4)]
    while left:
        for _ in range(3):
            group = world.draw()
            assert (group.draw.environment, group.draw.task_id) in left
            world.accept(group, reward, reward)
        world.quarantine(*left.pop(rng.randrange(len(left))))
    assert world.draw() is None
    assert world.curriculum.exhausted


@pytest.mark.parametrize("pools", [False, True])
def test_a_task_that_is_released_is_drawn_again_and_its_failures_are_forgotten(pools) -> None:
    world = World(environment("a", quarantine_after=2, pools={"enabled": pools}), count=2)
    for task in ("a0", "a1"):
        world.quarantine("a", task)
    assert world.curriculum.quarantined == [("a", "a0"), ("a", "a1")]
    assert world.curriculum.exhausted
    world.record(task_released=pb.TaskReleased(environment="a", task_id="a1", principal="op"))
    stream = world.curriculum.stream("a")
    assert (list(stream.quarantined), sum(stream.sizes().values())) == (["a0"], 1)
    group = world.draw()
    assert group.draw.task_id == "a1"
    world.drop(group, "ENVIRONMENT_DIED")
    assert list(stream.quarantined) == ["a0"], "its earlier failures do not count"
    world.drop(world.draw(), "ENVIRONMENT_DIED")
    assert world.curriculum.exhausted


def test_who_releases_tasks_names_one_or_all() -> None:
    world = World(environment("a"), environment("b"), count=3)
    for name, task in (("a", "a0"), ("a", "a1"), ("b", "b0")):
        world.quarantine(name, task)
    assert tasks_to_release(world.curriculum, "all") == [("a", "a0"), ("a", "a1"), ("b", "b0")]
    assert tasks_to_release(world.curriculum, '"a1"') == tasks_to_release(world.curriculum, "a/a1") == [("a", "a1")]
    with pytest.raises(SluiceError, match="3 are: a/a0, a/a1, b/b0"):
        tasks_to_release(world.curriculum, "a2")
