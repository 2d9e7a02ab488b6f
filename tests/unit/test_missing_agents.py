"""When an operator is told that external episodes wait for agents that do not come."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from session_facts import granted, lease_ended
from test_orchestrator_scheduler import Facts

from orchestrator_svc.config import EnvironmentConfig
from orchestrator_svc.journal.external import ExternalEpisodes, Lease
from orchestrator_svc.journal.facts import Reason, Stage
from orchestrator_svc.journal.ledger import Group, Ledger
from orchestrator_svc.run.curriculum import Curriculum
from orchestrator_svc.run.scheduler import OnStale, Scheduler, StalenessBound
from orchestrator_svc.sessions.desk import MissingAgents
from sluice.environments.base import Task
from sluice.v1 import journal_pb2 as pb
from sluice.versions import BASE, Version


def group(number: int, environment: str = "theirs", *, agent: bool = False, stage: Stage = Stage.RUNNING) -> Group:
    external = ExternalEpisodes.of(number, 2) if agent else None
    if external is not None:
        external.leases["lease"] = Lease(number, "lease", "ann", "r", (0,), {0}, 60.0)
    return Group(number, environment, "t", 0, 0, 2, 0, BASE, (BASE,), 0, stage=stage, external=external)


def test_an_environment_none_of_whose_groups_has_an_agent_for_so_long_is_named_once() -> None:
    missing = MissingAgents({"theirs"}, 60.0)
    offered = [group(1), group(2), group(3, "ours"), group(4, stage=Stage.READY)]
    assert [missing.look(offered, now) for now in (0.0, 59.0, 60.0, 70.0)] == [[], [], ["theirs"], []]
    assert missing.groups == {"theirs": 2}


def test_an_agent_of_one_group_is_enough_and_a_later_absence_is_told_again() -> None:
    missing = MissingAgents({"theirs"}, 60.0)
    missing.look([group(1)], 0.0)
    assert missing.look([group(1, agent=True), group(2)], 60.0) == []
    assert missing.look([group(2)], 61.0) == []
    assert missing.look([group(2)], 121.0) == ["theirs"]
    assert missing.look([], 122.0) == []
    assert missing.groups == {}


def test_a_run_without_external_environments_misses_nobody() -> None:
    missing = MissingAgents(set(), 60.0)
    assert [missing.look([group(1, "ours")], now) for now in (0.0, 1000.0)] == [[], []]


def test_what_nobody_takes_is_put_off_while_others_can_be_played_and_offered_again_when_an_agent_asks() -> None:
    missing = MissingAgents({"theirs", "hers"}, 60.0)
    offered = [group(1), group(2, agent=True), group(3, "hers"), group(4, "ours"), group(5, stage=Stage.READY)]
    missing.look(offered, 0.0)
    missing.look(offered, 60.0)

    def alone(names) -> bool:
        return False

    assert missing.put_off(offered, others_can=alone) == [], "nothing else can be played"
    assert missing.put_off(offered, others_can=lambda names: names == {"hers"}) == [3]
    assert missing.away == {"hers"}, "an agent has an episode of the other one"
    offered = [group(1), group(6, "hers")]
    assert missing.put_off(offered, others_can=alone) == [6], "it stays away"
    missing.asked()
    assert missing.put_off(offered, others_can=lambda _: True) == []
    assert [missing.look(offered, now) for now in (61.0, 120.0, 121.0)] == [[], [], ["theirs", "hers"]]
    assert missing.put_off(offered, others_can=lambda names: len(names) < 2) == [6], "one of them at least is played"


def test_agents_that_have_left_are_missed_as_those_that_never_came_and_one_that_takes_an_episode_is_back() -> None:
    missing = MissingAgents({"theirs"}, 60.0)
    begun, fresh = group(1, agent=True), group(2)
    assert begun.external is not None
    missing.look([begun, fresh], 0.0)
    begun.external.leases.clear()
    missing.look([begun, fresh], 1.0)
    missing.look([begun, fresh], 61.0)
    assert missing.put_off([begun, fresh], others_can=lambda _: True) == [1, 2]
    missing.look([], 100.0)
    assert missing.longest(100.0) == ("theirs", 99.0), "nothing is on offer of an environment that is away"
    missing.look([group(3, agent=True), group(4)], 101.0)
    assert (missing.away, missing.longest(101.0)) == (set(), ("", 0.0))


STEP_S, NOTICE_S = 10.0, 60.0
BATCH, STEPS = 2, 12


@dataclass
class Mixed:
    """A run that plays its own environment and one of agents outside, who are there or not. A tick is `STEP_S` long."""

    staleness: int
    weight: float
    now: float = 0.0
    ticks: dict[int, int] = field(default_factory=dict)  # that somebody has played each group
    draws: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.facts = Facts(self.ledger)
        self.scheduler = Scheduler(
            self.ledger,
            StalenessBound(self.staleness, BATCH, 1000),
            window_fraction=0.3,
            on_stale=OnStale.DROP,
            max_steps=STEPS,
            max_running=1000,
        )
        mix = (
            EnvironmentConfig(name="ours", environment="e", ratio=1.0),
            EnvironmentConfig(name="theirs", environment="e", ratio=self.weight),
        )
        self.curriculum = Curriculum([(each, [Task(str(n)) for n in range(9)]) for each in mix], seed=0)
        self.missing = MissingAgents({"theirs"}, NOTICE_S)
        self.facts.begin_epoch(self.scheduler, BASE)

    def record(self, **kind) -> None:
        self.facts.record(**kind)
        self.curriculum.apply_fact(pb.Fact(**kind))

    def running(self, environment: str) -> list[Group]:
        live = self.ledger.groups.values()
        return [each for each in live if each.stage is Stage.RUNNING and each.environment == environment]

    def tick(self, *, agents: bool) -> None:
        """Let time pass: all agents play, then the run makes its decisions."""
        self.now += STEP_S
        theirs = self.running("theirs")
        for each in theirs:
            lent = each.external is not None and bool(each.external.leases)
            count = each.external.granted if each.external is not None else 0
            if agents and not lent:
                self.facts.record(lease_granted=granted(each.number, count + 1, [0, 1]).lease_granted)
            elif lent and not agents:
                self.facts.record(lease_ended=lease_ended(each.number, count).lease_ended)
        if agents and not theirs:
            self.missing.asked()
        for each in [*self.running("ours"), *(theirs if agents else ())]:
            self.ticks[each.number] = self.ticks.get(each.number, 0) + 1
            if self.ticks[each.number] > each.number % 3:
                self.facts.accept(each.number, {each.floor}, trajectories=2)
                self.curriculum.apply_fact(pb.Fact(group_accepted=pb.GroupAccepted(group=each.number)))
        self.missing.look(self.ledger.groups.values(), self.now)
        for number in self.missing.put_off(self.ledger.groups.values(), others_can=self.curriculum.others_can):
            assert not agents, "an agent is there"
            self.record(group_dropped=pb.GroupDropped(group=number, reason=Reason.NO_AGENT, redraw=True))
        self.train()
        self.dispatch()

    def train(self) -> None:
        while True:
            for each in self.scheduler.stale_groups():
                self.record(group_dropped=pb.GroupDropped(group=each.number, reason=Reason.STALE, redraw=True))
            if (batch := self.scheduler.choose_batch()) is None:
                return
            self.facts.make_batch(batch)
            self.facts.apply(self.ledger.applied + 1, trained=2 * len(batch))

    def dispatch(self) -> None:
        while (version := self.scheduler.wanted_version()) is not None:
            draw = self.curriculum.choose_task(self.now, self.ledger.redraws, self.missing.away)
            if draw is None:
                return
            if not draw.reason:
                self.draws.append(draw.environment)
            newest = Version(self.ledger.epoch, self.ledger.applied)
            drawn = pb.TaskDrawn(
                environment=draw.environment,
                task_id=draw.task_id,
                draw=draw.draw,
                position=draw.position,
                redraw_reason=draw.reason,
                passed_over=draw.passed_over,
                group=self.ledger.next_group,
                episodes=2,
                policy_version=max(version, newest).to_proto(),
            )
            self.record(task_drawn=drawn)


@settings(max_examples=200, deadline=None)
@given(
    staleness=st.integers(0, 3),
    weight=st.sampled_from([0.25, 1.0, 3.0]),
    stretches=st.lists(st.tuples(st.booleans(), st.integers(1, 15)), max_size=6),
    come_back=st.booleans(),
)
def test_a_mixed_run_never_stands_still_for_longer_than_the_notice_and_ends(
    staleness, weight, stretches, come_back
) -> None:
    run, still, last = Mixed(staleness, weight), 0, 0
    there = [agents for agents, ticks in stretches for _ in range(ticks)]
    for agents in [*there, *[come_back] * 400]:
        if run.ledger.applied == STEPS:
            break
        run.tick(agents=agents)
        still = 0 if run.ledger.applied > last else still + 1
        last = run.ledger.applied
        # Until an absence is noticed, and then until a batch of other groups has been played; an agent that comes and goes adds as much.
        assert still <= (2 + len(stretches)) * (NOTICE_S / STEP_S + 6), "the run stands still"
    assert run.ledger.applied == STEPS


@settings(max_examples=100, deadline=None)
@given(staleness=st.integers(0, 3), weight=st.sampled_from([0.25, 1.0, 3.0]), absent=st.integers(1, 40))
def test_the_mix_is_as_wanted_again_when_the_agents_come_back(staleness, weight, absent) -> None:
    run = Mixed(staleness, weight)
    run.tick(agents=False)
    for _ in range(absent):
        if run.ledger.applied < STEPS // 2:
            run.tick(agents=False)
    run.missing.asked()
    before = len(run.draws)
    while run.ledger.applied < STEPS:
        run.tick(agents=True)
    since = run.draws[before:]
    assert abs(since.count("theirs") - len(since) * weight / (1 + weight)) < 2
