"""The ledger under any order of events: it never gives up a needed version, and its newest version only grows."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sluice.versions import Version
from weightsync.service.chain import Forms, delta_chain, find_path, newest_dense, newest_model, next_dense
from weightsync.service.ledger import Ledger, RefusedError

LEASE_S = 10.0
versions = st.builds(Version, st.integers(1, 3), st.integers(0, 6))
replicas = st.sampled_from(["a", "b", "c"])


def whole(digest: str) -> Forms:
    """A version that was pushed whole."""
    return Forms(digest, dense_bytes=10, copy_bytes=10)


class LedgerMachine(RuleBasedStateMachine):
    """Compares a ledger with a simple record of the calls that were made to it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(keep=2, anchor_every=3)
        self.now = 0.0
        self.content: dict[Version, str] = {}
        self.leases: dict[str, tuple[set[Version | None], float]] = {}
        self.holds: set[tuple[Version, str]] = set()
        self.newest: Version | None = None

    def needed(self) -> set[Version | None]:
        served = {version for said, expires in self.leases.values() if expires > self.now for version in said}
        return served | {version for version, _ in self.holds} | {self.newest}

    def reachable(self, version: Version | None) -> bool:
        """Told by the definition, not by the code under test."""
        forms = self.ledger.committed.get(version)
        if forms is None:
            return False
        if forms.is_adapter or forms.dense_bytes is not None:
            return True
        return not forms.damaged and self.reachable(forms.base)

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

    @rule(version=versions, base=versions, size=st.integers(1, 9))
    def commit_delta(self, version: Version, base: Version, size: int) -> None:
        if version in self.ledger.committed:
            return
        known = self.ledger.committed.get(base)
        sound = known is not None and not known.is_adapter and base < version and self.reachable(base)
        allowed = sound and (self.newest is None or version > self.newest)
        try:
            self.ledger.commit(version, Forms("d", delta_bytes=size, base=base, copy_bytes=10))
        except RefusedError:
            assert not allowed
        else:
            assert allowed
            self.content[version], self.newest = "d", version

    @rule(back=st.integers(0, 2), size=st.integers(1, 9))
    def commit_next_delta(self, back: int, size: int) -> None:
        """Commit the delta that a trainer nearly always commits, because random versions seldom hit it."""
        models = sorted(version for version, forms in self.ledger.committed.items() if not forms.is_adapter)
        if self.newest is not None and models[-1 - back :]:
            self.commit_delta(Version(self.newest.epoch, self.newest.number + 1), models[-1 - back :][0], size)

    @rule()
    def commit_next_adapter(self) -> None:
        base = newest_model(self.ledger.committed)
        if self.newest is not None and base is not None:
            self.commit_adapter(Version(self.newest.epoch, self.newest.number + 1), base)

    @rule(version=versions, base=versions)
    def commit_adapter(self, version: Version, base: Version) -> None:
        if version in self.ledger.committed or (self.newest is not None and version <= self.newest):
            return
        known = self.ledger.committed.get(base)
        forms = Forms("a", adapter_bytes=1, base=base)
        if known is None or known.is_adapter or base >= version:
            with pytest.raises(RefusedError):
                self.ledger.commit(version, forms)
        else:
            self.ledger.commit(version, forms)
            self.content[version], self.newest = "a", version

    @rule(damaged=st.booleans())
    def make_dense(self, damaged: bool) -> None:
        path = next_dense(self.ledger.committed)
        if path is not None and damaged:
            self.ledger.mark_damaged(path[1].version)
        elif path is not None:
            self.ledger.add_dense(path[-1].version, 10)

    @rule(replica=replicas, serving=st.none() | versions, staged=st.none() | versions)
    def report(self, replica: str, serving: Version | None, staged: Version | None) -> None:
        self.ledger.report(replica, serving=serving, staged=staged, error="", now=self.now, lease_s=LEASE_S)
        self.leases[replica] = ({serving, staged} - {None}, self.now + LEASE_S)

    @rule(replica=replicas, back=st.integers(0, 4))
    def report_recent(self, replica: str, back: int) -> None:
        if recent := sorted(self.ledger.committed)[-1 - back :]:
            self.report(replica, recent[0], None)

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

    @rule(back=st.integers(0, 4), seconds=st.floats(0, 2 * LEASE_S))
    def linger(self, back: int, seconds: float) -> None:
        if recent := sorted(self.ledger.committed)[-1 - back :]:
            self.ledger.linger(recent[0], self.now + seconds)

    @rule(seconds=st.floats(0, 2 * LEASE_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def retain(self) -> None:
        """Whatever retention removes, after each step needed versions are reachable, held forms stay, and replicas keep their deltas."""
        needed, before = self.needed(), dict(self.ledger.committed)
        reachable = {version for version in before if self.reachable(version)}
        ways = self.ways_of_replicas()
        latest = newest_dense(before)
        newest_live = sorted(before.keys() - self.ledger.retired(), reverse=True)
        for version in self.ledger.surplus(self.now):
            assert version not in needed
            assert self.ledger.delete(version, self.now)
            assert all(self.reachable(each) for each in reachable & self.ledger.committed.keys())
        for version in self.ledger.surplus_dense(self.now):
            assert version not in {held for held, _ in self.holds}
            self.ledger.drop_dense(version)
            assert all(self.reachable(each) for each in reachable & self.ledger.committed.keys())
        assert not self.ledger.surplus(self.now)
        left = self.ledger.committed
        assert before.keys() & needed == left.keys() & needed
        assert latest is None or left[latest].dense_bytes is not None
        assert set(newest_live[:2]) <= left.keys()
        assert ways == self.ways_of_replicas()

    def ways_of_replicas(self) -> dict[Version, list[Version]]:
        """The deltas from what replicas have to the newest, where they are smaller than a dense copy."""
        versions, target = self.ledger.committed, newest_model(self.ledger.committed)
        ways = {}
        for version in self.needed() - {held for held, _ in self.holds} - {None}:
            way = delta_chain(versions, version, target) if target and version in versions else None
            if way and sum(versions[each].delta_bytes or 0 for each in way) < 10:
                ways[version] = way
        return ways

    @rule(version=versions)
    def delete(self, version: Version) -> None:
        present = version in self.ledger.committed
        reachable = {each for each in self.ledger.committed if self.reachable(each)}
        if present and self.ledger.needed_by(version, self.now):
            with pytest.raises(RefusedError):
                self.ledger.delete(version, self.now)
        else:
            assert not present or version not in self.needed()
            assert self.ledger.delete(version, self.now) == present
        assert all(self.reachable(each) for each in reachable & self.ledger.committed.keys())

    @invariant()
    def the_newest_is_there_and_nothing_changed(self) -> None:
        assert self.ledger.newest == self.newest
        assert all(self.content[version] == each.digest for version, each in self.ledger.committed.items())
        assert not set(self.ledger.evictable(self.now)) & self.needed()

    @invariant()
    def a_way_is_found_exactly_where_there_is_one(self) -> None:
        committed = self.ledger.committed
        for version in committed:
            assert (find_path(committed, version) is not None) == self.reachable(version)


LedgerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestLedger = LedgerMachine.TestCase


def test_resuming_from_a_checkpoint_retires_what_came_after_it() -> None:
    ledger = Ledger(keep=3)
    for number in (6, 7, 8):
        ledger.commit(Version(1, number), whole(str(number)))
    ledger.commit(Version(2, 6), whole("resumed"))
    assert ledger.retired() == {Version(1, 7), Version(1, 8)}
    assert ledger.surplus(0.0) == [Version(1, 7), Version(1, 8)]


def test_retention_leaves_the_deltas_of_a_replica_whose_version_a_receiver_has_just_pulled_whole() -> None:
    ledger = Ledger(keep=1)
    ledger.commit(Version(1, 1), whole("1"))
    for number in (2, 3):
        forms = Forms(str(number), delta_bytes=1, base=Version(1, number - 1), copy_bytes=10)
        ledger.commit(Version(1, number), forms)
    ledger.add_dense(Version(1, 3), 10)
    ledger.commit(Version(2, 1), whole("resumed"))
    ledger.report("replica", serving=Version(1, 3), staged=None, error="", now=0.0, lease_s=LEASE_S)
    ledger.linger(Version(1, 3), until=LEASE_S)
    for version in ledger.surplus(0.0):
        assert ledger.delete(version, 0.0), "nothing that is needed is surplus"


def test_a_version_older_than_the_newest_is_refused() -> None:
    ledger = Ledger(keep=3)
    ledger.commit(Version(2, 5), whole("x"))
    with pytest.raises(RefusedError) as older:
        ledger.check_push(Version(1, 9))
    with pytest.raises(RefusedError) as overtaken:
        ledger.check_push(Version(2, 4))
    assert (older.value.reason, overtaken.value.reason) == ("OLDER_EPOCH", "OVERTAKEN")


def test_a_replica_may_report_while_there_is_room_or_it_is_live() -> None:
    ledger = Ledger(keep=1)
    for name in ("a", "b"):
        assert ledger.has_room(name, 2, now=0.0)
        ledger.report(name, serving=None, staged=None, error="", now=0.0, lease_s=LEASE_S)
    assert ledger.has_room("a", 2, now=1.0), "it is live"
    assert not ledger.has_room("c", 2, now=1.0)
    assert ledger.has_room("c", 2, now=LEASE_S), "the leases of the others are over"
    assert ledger.leases == 0, "and they are forgotten, since room was needed"


def test_a_lease_is_over_in_time_though_nobody_looked_at_the_others() -> None:
    ledger = Ledger(keep=1)
    ledger.report("a", serving=Version(1, 1), staged=None, error="", now=0.0, lease_s=LEASE_S)
    known = ledger.lease("a", now=LEASE_S - 1)
    assert known is not None
    assert known.serving == Version(1, 1)
    assert ledger.lease("a", now=LEASE_S) is None
    assert ledger.lease("b", now=0.0) is None
    assert ledger.leases == 1
