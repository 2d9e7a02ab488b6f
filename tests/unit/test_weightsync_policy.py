"""FOLLOW, HOLD and TARGET on a simulated clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sluice.versions import BASE, Version
from weightsync.receiver import PolicyError, PolicyHeldError, PolicyMode, WeightPolicy

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(2, 0)
FOLLOW, HOLD, TARGET = PolicyMode


def test_follow_wants_the_newest_and_never_an_older_one() -> None:
    policy = WeightPolicy()
    assert policy.wanted(BASE, None, 0) is None
    assert policy.wanted(BASE, V2, 0) == V2
    assert policy.wanted(V2, V2, 0) is None
    assert policy.wanted(V2, V1, 0) is None
    assert policy.wanted(V2, V3, 0) == V3


def test_hold_stays_until_its_time_is_over() -> None:
    policy = WeightPolicy()
    policy.set(HOLD, owner="eval", ttl_s=10, serving=V1, now=100)
    assert policy.wanted(V1, V2, 109.9) is None
    assert policy.expires_in(109.0) == pytest.approx(1.0)
    assert policy.wanted(V1, V2, 110) == V2
    assert policy.expires_in(110) == math.inf


def test_target_goes_forwards_and_backwards_and_stays() -> None:
    policy = WeightPolicy()
    policy.set(TARGET, V1, owner="eval", ttl_s=10, serving=V2, now=0)
    assert policy.wanted(V2, V3, 1) == V1
    assert policy.wanted(V1, V3, 1) is None


def test_only_the_owner_changes_a_policy() -> None:
    policy = WeightPolicy()
    policy.set(HOLD, owner="eval", ttl_s=10, serving=V1, now=0)
    with pytest.raises(PolicyHeldError, match="eval"):
        policy.set(FOLLOW, owner="other", serving=V1, now=1)
    policy.set(TARGET, V2, owner="eval", ttl_s=10, serving=V1, now=1)
    policy.set(FOLLOW, owner="eval", serving=V1, now=2)
    policy.set(HOLD, owner="other", ttl_s=1, serving=V1, now=2)


@pytest.mark.parametrize(
    ("mode", "version", "owner", "ttl_s"),
    [
        (HOLD, None, "", 1.0),
        (HOLD, None, "a", None),
        (HOLD, None, "a", 0.0),
        (TARGET, V2, "a", math.inf),
        (TARGET, None, "a", 1.0),
        (HOLD, V2, "a", 1.0),
    ],
)
def test_policies_without_owner_end_or_version_are_refused(
    mode: PolicyMode, version: Version | None, owner: str, ttl_s: float | None
) -> None:
    policy = WeightPolicy()
    with pytest.raises(PolicyError):
        policy.set(mode, version, owner=owner, ttl_s=ttl_s, serving=V1, now=0)
    assert policy.current(0).mode is FOLLOW


class PolicyMachine(RuleBasedStateMachine):
    """Nothing is held beyond its time to live, and nobody but the owner ends it before."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = WeightPolicy()
        self.now = 0.0
        self.held: tuple[str, float] | None = None

    @rule(mode=st.sampled_from(PolicyMode), owner=st.sampled_from(["a", "b"]), ttl_s=st.floats(0.1, 10))
    def set(self, mode: PolicyMode, owner: str, ttl_s: float) -> None:
        version = V2 if mode is TARGET else None
        foreign = self.held is not None and self.held[1] > self.now and self.held[0] != owner
        try:
            self.policy.set(mode, version, owner=owner, ttl_s=ttl_s, serving=V1, now=self.now)
        except PolicyHeldError:
            assert foreign
        else:
            assert not foreign
            self.held = None if mode is FOLLOW else (owner, self.now + ttl_s)

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_policy_ends_when_it_must(self) -> None:
        held = self.held is not None and self.held[1] > self.now
        assert (self.policy.current(self.now).mode is not FOLLOW) == held


TestPolicy = PolicyMachine.TestCase
