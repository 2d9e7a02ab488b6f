"""Which replicas a gateway uses, from one list of the orchestrator to the next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.sampling.listed import KEPT_S, ListedReplicas
from sluice.v1 import session_pb2


def listed(*usable: str, unusable: tuple[str, ...] = ()) -> session_pb2.WatchReplicasResponse:
    replicas = [
        session_pb2.ListedReplica(replica=f"name-{each}", address=each, usable=each in usable)
        for each in (*usable, *unusable)
    ]
    return session_pb2.WatchReplicasResponse(replicas=replicas)


def test_a_replica_that_is_listed_as_leaving_is_left_at_once() -> None:
    replicas = ListedReplicas()
    assert replicas.take(listed("a", "b"), 0.0) == {"a": "name-a", "b": "name-b"}
    assert replicas.take(listed("a", unusable=("b",)), 0.0) == {"a": "name-a"}


def test_an_orchestrator_that_was_restarted_takes_nothing_away_until_it_knows_its_replicas() -> None:
    replicas = ListedReplicas()
    replicas.take(listed("a", "b"), 0.0)
    assert set(replicas.take(listed(), 1000.0)) == {"a", "b"}
    assert set(replicas.take(listed("a"), 1010.0)) == {"a", "b"}
    assert set(replicas.take(listed("a"), 1000.0 + KEPT_S)) == {"a"}


LISTS = st.lists(st.tuples(st.floats(0, 2 * KEPT_S), st.dictionaries(st.sampled_from("abcd"), st.booleans())))


@given(LISTS)
def test_what_is_used_was_listed_lately_and_what_is_listed_is_used(steps) -> None:
    replicas, now = ListedReplicas(), 0.0
    gone_since: dict[str, float] = {}
    used: set[str] = set()
    for seconds, states in steps:
        now += seconds
        usable = {each for each, may in states.items() if may}
        gone_since = {each: gone_since.get(each, now) for each in used - states.keys()}
        used = usable | {each for each, since in gone_since.items() if now - since < KEPT_S}
        unusable = tuple(states.keys() - usable)
        assert set(replicas.take(listed(*usable, unusable=unusable), now)) == used
