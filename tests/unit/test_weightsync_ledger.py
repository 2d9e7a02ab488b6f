"""The ledger under any order of events: what is needed is never given up, what is newest only grows."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sluice.versions import Version
from weightsync.chain import Forms
from weightsync.ledger import Ledger, RefusedError

LEASE_S = 10.0
versions = st.builds(Version, st.integers(1, 3), st.integers(0, 6))
replicas = st.sampled_from(["a", "b", "c"])


def whole(digest: str) -> Forms:
    """A version that was pushed whole."""
    return Forms(digest, dense_bytes=10, copy_bytes=10)


class LedgerMachine(RuleBasedStateMachine):
    """Compares a ledger with a plain account of what was said to it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(keep=2)
        self.now = 0.0
        self.content: dict[Version, str] = {}
        self.leases: dict[str, tuple[set[Version | None], float]] = {}
        self.holds: set[tuple[Version, str]] = set()
        self.newest: Version | None = None

    def needed(self) -> set[Version | None]:
        served = {version for said, expires in self.leases.values() if expires > self.now for version in said}
        return served | {version for version, _ in self.holds} | {self.newest}

    @rule(version=versions, digest=st.sampled_from(["x", "y"]))
    def commit(self, version: Version, digest: str) -> None:
        known = self.ledger.committed.get(version)
        allowed = self.newest is None or version > self.newest or (known is not None and known.digest == digest)
        try:
            new = self.ledger.commit(version, whole(digest))
        except RefusedError as error:
            reason = error.reason
        else:
            reason = ""
        assert (not reason) == allowed
        assert (reason == "OTHER_DIGEST") == (known is not None and not allowed)
        if allowed:
            assert new == (known is None)
            self.content[version] = digest
            self.newest = max(version, self.newest or version)

    @rule(replica=replicas, serving=st.none() | versions, staged=st.none() | versions)
    def report(self, replica: str, serving: Version | None, staged: Version | None) -> None:
        self.ledger.report(replica, serving=serving, staged=staged, error="", now=self.now, lease_s=LEASE_S)
        self.leases[replica] = ({serving, staged} - {None}, self.now + LEASE_S)

    @rule(version=versions, holder=replicas)
    def hold(self, version: Version, holder: str) -> None:
        if version in self.ledger.committed:
            self.ledger.hold(version, holder)
            self.holds.add((version, holder))
        else:
            with pytest.raises(RefusedError):
                self.ledger.hold(version, holder)

    @rule(version=versions, holder=replicas)
    def release(self, version: Version, holder: str) -> None:
        self.ledger.release(version, holder)
        self.holds.discard((version, holder))

    @rule(seconds=st.floats(0, 2 * LEASE_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def retain(self) -> None:
        needed = self.needed()
        before = set(self.ledger.committed)
        for version in self.ledger.surplus(self.now):
            assert version not in needed
            assert self.ledger.delete(version, self.now)
        left = set(self.ledger.committed)
        idle = left - needed - self.ledger.retired()
        assert len(idle) <= self.ledger.keep
        assert before & needed == left & needed

    @rule(version=versions)
    def delete(self, version: Version) -> None:
        if version in self.needed() and version in self.ledger.committed:
            with pytest.raises(RefusedError):
                self.ledger.delete(version, self.now)
        else:
            present = version in self.ledger.committed
            assert self.ledger.delete(version, self.now) == present

    @invariant()
    def the_newest_is_there_and_nothing_changed(self) -> None:
        assert self.ledger.newest == self.newest
        assert all(self.content[version] == each.digest for version, each in self.ledger.committed.items())
        assert not set(self.ledger.evictable(self.now)) & self.needed()


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_resuming_from_a_checkpoint_retires_what_came_after_it() -> None:
    ledger = Ledger(keep=3)
    for number in (6, 7, 8):
        ledger.commit(Version(1, number), whole(str(number)))
    ledger.commit(Version(2, 6), whole("resumed"))
    assert ledger.retired() == {Version(1, 7), Version(1, 8)}
    assert ledger.surplus(0.0) == [Version(1, 7), Version(1, 8)]


def test_a_version_older_than_the_newest_is_refused() -> None:
    ledger = Ledger(keep=3)
    ledger.commit(Version(2, 5), whole("x"))
    with pytest.raises(RefusedError) as older:
        ledger.check_push(Version(1, 9))
    with pytest.raises(RefusedError) as overtaken:
        ledger.check_push(Version(2, 4))
    assert (older.value.reason, overtaken.value.reason) == ("OLDER_EPOCH", "OVERTAKEN")
