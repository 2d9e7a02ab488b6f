"""Who paused a replica, and until when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollout_svc.admin import MAX_TTL_S, PauseHeldError, Pauses


def test_another_owner_waits_until_a_pause_ends_by_itself():
    pauses = Pauses()
    pauses.begin("a", 10, now=0)
    with pytest.raises(PauseHeldError, match="'a' holds a pause for 1 s more"):
        pauses.begin("b", 10, now=9)
    pauses.begin("b", 10, now=10)
    assert pauses.owner == "b"


def test_an_owner_prolongs_its_pause():
    pauses = Pauses()
    pauses.begin("a", 10, now=0)
    pauses.begin("a", 10, now=9)
    assert not pauses.expire(now=18)
    assert pauses.expire(now=19)
    assert not pauses.expire(now=20)


def test_only_the_owner_ends_its_pause():
    pauses = Pauses()
    pauses.begin("a", 10, now=0)
    with pytest.raises(PauseHeldError):
        pauses.end("b", now=1)
    assert pauses.end("a", now=1)
    assert not pauses.end("a", now=1)


@pytest.mark.parametrize(("owner", "ttl_s"), [("", 10), ("a", 0), ("a", -1), ("a", MAX_TTL_S + 1), ("a", float("nan"))])
def test_a_pause_needs_an_owner_and_an_end(owner, ttl_s):
    pauses = Pauses()
    with pytest.raises(ValueError, match="owner" if not owner else "ttl"):
        pauses.begin(owner, ttl_s, now=0)
    assert not pauses.owner


@given(st.floats(min_value=0.001, max_value=MAX_TTL_S), st.floats(min_value=0, max_value=1e6))
def test_no_pause_outlives_its_time(ttl_s, now):
    pauses = Pauses()
    pauses.begin("a", ttl_s, now)
    assert pauses.expire(now + MAX_TTL_S + 1)


class PausedReplica(RuleBasedStateMachine):
    """A replica samples exactly while no pause that somebody asked for lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses, self.now = Pauses(), 0.0
        self.lasting: dict[str, float] = {}

    @rule(owner=st.sampled_from("abc"), ttl_s=st.integers(1, 20))
    def begin(self, owner: str, ttl_s: int) -> None:
        others = [end for name, end in self.lasting.items() if name != owner and end > self.now]
        if others:
            with pytest.raises(PauseHeldError):
                self.pauses.begin(owner, ttl_s, self.now)
            return
        self.pauses.begin(owner, ttl_s, self.now)
        self.lasting = {owner: self.now + ttl_s}

    @rule(owner=st.sampled_from("abc"))
    def end(self, owner: str) -> None:
        if any(end > self.now for name, end in self.lasting.items() if name != owner):
            with pytest.raises(PauseHeldError):
                self.pauses.end(owner, self.now)
            return
        self.pauses.end(owner, self.now)
        self.lasting = {}

    @rule(seconds=st.integers(0, 15))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.pauses.expire(self.now)
        self.lasting = {name: end for name, end in self.lasting.items() if end > self.now}

    @invariant()
    def at_most_one_owner(self) -> None:
        assert self.pauses.owner == next(iter(self.lasting), "")


TestPausedReplica = PausedReplica.TestCase
