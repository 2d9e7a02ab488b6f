"""When an operator is told that external episodes wait for agents that do not come."""

from __future__ import annotations

from orchestrator_svc.journal.external import ExternalEpisodes
from orchestrator_svc.journal.ledger import Group, Stage
from orchestrator_svc.sessions.absence import MissingAgents
from sluice.versions import BASE


def group(number: int, environment: str = "theirs", *, agent: bool = False, stage: Stage = Stage.RUNNING) -> Group:
    external = ExternalEpisodes.of(number, 2) if agent else None
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
