"""Which source an engine takes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sluice.host_files import host_id
from sluice.rpc.server import advertised_address
from sluice.versions import Version
from weightsync.receive.sources import ROOT, Candidate, behind, choose

versions = st.none() | st.builds(Version, st.integers(1, 2), st.integers(0, 4))
relays = st.builds(
    Candidate,
    address=st.sampled_from(["a:1", "b:1", "c:1", "d:1"]),
    host=st.sampled_from(["here", "there"]),
    watchers=st.integers(0, 50),
    newest=versions,
    latency_s=st.floats(0.0, 2.0),
)
roots = st.builds(
    Candidate,
    address=st.just(ROOT),
    host=st.sampled_from(["here", "there"]),
    watchers=st.integers(0, 50),
    newest=versions,
    latency_s=st.floats(0.0, 2.0),
)
fleets = st.builds(
    lambda root, others: [root, *others] if root else others,
    st.none() | roots,
    st.lists(relays, max_size=4, unique_by=lambda each: each.address),
)
currents = st.sampled_from([None, ROOT, "a:1", "b:1", "gone:1"])
draws = st.floats(0.0, 1.0, exclude_max=True)


def pick(candidates: list[Candidate], current: str | None = None, draw: float = 0.99, replica: str = "r0") -> str:
    return choose(candidates, current, host="here", replica=replica, draw=draw)


def relay(address: str, watchers: int = 0, host: str = "there", newest: int = 5, latency_s: float = 0.001) -> Candidate:
    return Candidate(address, host, watchers, Version(1, newest), latency_s)


ROOT_AWAY = relay(ROOT, watchers=2)


def test_a_source_of_the_same_host_comes_first() -> None:
    assert pick([ROOT_AWAY, relay("far:1"), relay("near:1", watchers=500, host="here", latency_s=1.0)]) == "near:1"
    assert pick([replace(ROOT_AWAY, host="here"), relay("far:1")]) == ROOT


def test_a_relay_is_taken_rather_than_a_distant_root() -> None:
    assert pick([ROOT_AWAY, relay("far:1", watchers=900)]) == "far:1"


def test_a_source_with_fewer_watchers_is_taken_and_the_quicker_of_equals() -> None:
    assert pick([relay("a:1", watchers=9), relay("b:1", watchers=3)]) == "b:1"
    assert pick([relay("a:1", latency_s=0.1), relay("b:1", latency_s=0.01)]) == "b:1"


def test_engines_that_start_together_spread_over_equal_relays() -> None:
    chosen = Counter(pick([relay("a:1"), relay("b:1")], replica=f"replica-{index}") for index in range(64))
    assert min(chosen["a:1"], chosen["b:1"]) >= 16


def test_a_relay_that_lacks_more_than_one_version_is_left() -> None:
    assert pick([ROOT_AWAY, relay("a:1", newest=4)], current="a:1") == "a:1"
    assert pick([ROOT_AWAY, relay("a:1", newest=3)], current="a:1") == ROOT
    assert pick([ROOT_AWAY, replace(relay("a:1"), newest=Version(0, 5))], current="a:1") == ROOT


def test_an_engine_enters_a_relay_only_when_that_has_what_the_engine_heard_of() -> None:
    assert pick([ROOT_AWAY, relay("a:1", newest=4)], current=ROOT) == ROOT
    assert pick([ROOT_AWAY, relay("a:1", newest=5)], current=ROOT) == "a:1"


def test_a_crowded_relay_is_left_by_some() -> None:
    candidates = [relay("a:1", watchers=12), relay("b:1", watchers=4)]
    assert pick(candidates, current="a:1", draw=0.2) == "b:1"
    assert pick(candidates, current="a:1", draw=0.5) == "a:1"
    assert pick([relay("a:1", watchers=9), relay("b:1", watchers=7)], current="a:1", draw=0.0) == "a:1"


@given(fleets, currents, draws)
def test_the_choice_is_a_candidate_that_keeps_up_or_the_root(
    candidates: list[Candidate], current: str | None, draw: float
) -> None:
    chosen = pick(candidates, current, draw)
    newest = max((each.newest for each in candidates if each.newest), default=None)
    assert chosen == ROOT or any(each.address == chosen and behind(each.newest, newest) <= 1 for each in candidates)


@given(fleets, currents, draws, draws)
def test_a_choice_once_made_stays(candidates: list[Candidate], current: str | None, draw: float, later: float) -> None:
    chosen = pick(candidates, current, draw)
    joined = [replace(each, watchers=each.watchers + (each.address == chosen != current)) for each in candidates]
    again = pick(joined, chosen, later)
    if again != chosen:  # only a crowd is left, and only for much less of one
        load = {each.address: each.watchers for each in joined}
        assert load[chosen] >= 2 * (load[again] + 1)


@given(st.integers(0, 100), st.integers(0, 100), draws)
def test_balancing_never_turns_the_balance(crowded: int, other: int, draw: float) -> None:
    """If every engine of a crowded relay drew, the expected number that leaves makes both equal, no more."""
    chosen = pick([relay("a:1", watchers=crowded), relay("b:1", watchers=other)], "a:1", draw)
    if chosen == "b:1":
        assert crowded * draw <= (crowded - other) / 2


def test_versions_behind() -> None:
    assert behind(None, None) == behind(Version(1, 1), None) == behind(Version(2, 0), Version(1, 9)) == 0
    assert behind(Version(1, 3), Version(1, 5)) == 2
    assert behind(None, Version(1, 5)) == behind(Version(1, 5), Version(2, 0)) == math.inf


def test_a_host_has_one_name(tmp_path: Path) -> None:
    assert host_id() == host_id()
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("11111111-0000-0000-0000-000000000000\n")
    other.write_text("22222222-0000-0000-0000-000000000000\n")
    assert len({host_id(one), host_id(other), host_id(tmp_path / "missing")}) == 3


def test_the_address_that_a_relay_tells() -> None:
    assert advertised_address(None, "127.0.0.1:7101") == "127.0.0.1:7101"
    assert advertised_address("relay.example:7", "0.0.0.0:7101") == "relay.example:7"
    assert advertised_address(None, "unix:/run/relay.sock") == "unix:/run/relay.sock"
    for wildcard in ("0.0.0.0:7101", "[::]:7101"):
        host, _, port = advertised_address(None, wildcard).rpartition(":")
        assert host
        assert host not in {"0.0.0.0", "[::]"}
        assert port == "7101"
