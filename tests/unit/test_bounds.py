"""How much a server holds for its clients: which connection gives way, and who may still send bytes when there are many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.rpc.bounds import Connections, Room


def test_the_peer_with_most_half_heads_loses_the_oldest() -> None:
    open_ones = Connections(4)
    assert [open_ones.open(f"flood {number}", "flood") for number in range(3)] == [None] * 3
    assert open_ones.open("agent", "agent") is None
    assert open_ones.open("another agent", "another") == "flood 0"
    assert len(open_ones) == 4


def test_connections_whose_requests_are_served_stay() -> None:
    open_ones = Connections(2)
    for name in ("first", "second"):
        open_ones.open(name, "agent")
        open_ones.serve(name)
    assert open_ones.open("third", "agent") == "third"
    open_ones.wait("first")
    assert open_ones.open("fourth", "agent") == "first"
    open_ones.close("first")  # its end is told once more when the transport is closed
    assert len(open_ones) == 2


@given(st.lists(st.tuples(st.sampled_from(["open", "serve", "wait", "close"]), st.integers(0, 9), st.integers(0, 2))))
def test_there_are_never_more_than_allowed(steps) -> None:
    open_ones, known = Connections(3), set()
    for number, (what, which, peer) in enumerate(steps):
        if what == "open":
            name = (which, number)
            known.add(name)
            known.discard(open_ones.open(name, str(peer)))
        elif known:
            name = sorted(known)[which % len(known)]
            getattr(open_ones, what)(name)
            if what == "close":
                known.discard(name)
        assert len(open_ones) == len(known) <= 3


SIZES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 400)), max_size=60)


@given(SIZES)
def test_bytes_are_bounded_and_given_back(sizes) -> None:
    room, held = Room(1024), []
    for tenant, size in sizes:
        if room.take(tenant, size):
            held.append((tenant, size))
        else:
            room.give_back(tenant, size)
        assert room.held == sum(size for _, size in held) <= 1024
    for tenant, size in held:
        room.give_back(tenant, size)
    assert room.held == 0
    assert room.take(0, 768)


def test_one_that_sends_much_does_not_keep_others_out() -> None:
    room = Room(64 << 20)
    while room.take("flood", 1 << 20):
        pass
    assert room.take("agent", 1 << 20)
    assert not room.take("another flood", 2 << 20)
