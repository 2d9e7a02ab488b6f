"""How the nodes of a trainer find each other, without ranks: threads stand for machines."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from held_ports import held_ports
from torch.distributed import TCPStore

from sluice.supervise.node_rendezvous import NodeRendezvous, Nodes, NodesMissingError

DEADLINE_S = 300.0
LOST_S = 12.0


class Time:
    """Passes when a test says so."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def port() -> Iterator[int]:
    with held_ports(1) as (port,):
        yield port


made: list[NodeRendezvous] = []


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """A thread that is in a call of the store would end the process with an error."""
    yield
    for each in made:
        each.shutdown()
    for thread in threading.enumerate():
        if thread.name == "signs of life":
            thread.join()
    made.clear()  # and with them their stores, which the threads need


def node(
    rank: int,
    port: int,
    *,
    count: int = 2,
    join_s: float = DEADLINE_S,
    lost_s: float = DEADLINE_S,
    clock: Callable[[], float] = time.monotonic,
) -> NodeRendezvous:
    made.append(NodeRendezvous(Nodes(count, rank, "127.0.0.1", port, join_s, lost_s), "ranks", clock))
    return made[-1]


def store(port: int) -> TCPStore:
    """Return the store that the first node serves."""
    return TCPStore("127.0.0.1", port, timeout=timedelta(seconds=DEADLINE_S))


def test_nodes_that_all_come_get_the_ranks_of_their_numbers(port: int) -> None:
    nodes = [node(rank, port, count=3) for rank in (2, 0, 1)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(NodeRendezvous.next_rendezvous, nodes))
    assert [(each.rank, each.world_size) for each in found] == [(2, 3), (0, 3), (1, 3)]
    addresses = {(each.bootstrap_store_info.master_addr, each.bootstrap_store_info.master_port) for each in found}
    assert addresses == {("127.0.0.1", port)}


def test_the_first_node_says_how_many_joined_and_which_are_missing(port: int) -> None:
    two_have_joined = threading.Event()

    def time_until_then() -> Iterator[float]:
        yield from (0.0, 0.0)  # the node joins
        assert two_have_joined.wait(DEADLINE_S)
        yield DEADLINE_S  # it waits no longer for the others

    with ThreadPoolExecutor(2) as threads:
        joins = []
        for rank in (0, 2):
            joining = node(rank, port, count=4, clock=time_until_then().__next__)
            joins.append(threads.submit(joining.next_rendezvous))
            store(port).wait([f"sluice/joined/{rank}"])
        two_have_joined.set()
        for join in joins:
            with pytest.raises(
                NodesMissingError, match=rf"2 of 4 nodes joined at 127\.0\.0\.1:{port} within 300 s: node 1, 3 did not"
            ):
                join.result(DEADLINE_S)


@pytest.mark.slow
def test_a_node_without_the_first_one_names_its_address(port: int) -> None:
    with pytest.raises(
        NodesMissingError, match=f"node 1 of 2 did not join the first node at 127.0.0.1:{port} within 1 s"
    ):
        node(1, port, join_s=1).next_rendezvous()


def test_a_node_that_was_restarted_alone_does_not_join_the_ranks_before(port: int) -> None:
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(NodeRendezvous.next_rendezvous, [before := node(0, port), node(1, port)]))
        quick = itertools.count(step=10).__next__  # each look at it takes ten seconds
        with pytest.raises(NodesMissingError, match="the ranks before still run there"):
            node(1, port, join_s=20, clock=quick).next_rendezvous()
    assert before.num_nodes_waiting() == 0


def test_a_port_that_another_program_has_is_named(port: int) -> None:
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(NodeRendezvous.next_rendezvous, [kept := node(0, port), node(1, port)]))
        with pytest.raises(
            NodesMissingError, match=rf"cannot listen at 127\.0\.0\.1:{port} .*trainer\.parallel\.rendezvous_port"
        ):
            node(0, port).next_rendezvous()
    assert kept.num_nodes_waiting() == 0


def test_a_node_that_gives_no_sign_of_life_is_named(port: int) -> None:
    clock = Time()
    first = node(0, port, lost_s=LOST_S, clock=clock)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(first.next_rendezvous)
        store(port).add("sluice/joined/1", 1)
        joining.result(DEADLINE_S)
    clock.now_s = LOST_S
    assert first.num_nodes_waiting() == 0
    clock.now_s += 1
    with pytest.raises(NodesMissingError, match=r"node 1 of 2 gave no sign of life for 12 s"):
        first.num_nodes_waiting()


@pytest.mark.slow
def test_a_sign_of_life_counts_from_when_it_came(port: int) -> None:
    clock = Time()
    first = node(0, port, lost_s=LOST_S, clock=clock)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(first.next_rendezvous)
        other = store(port)
        other.add("sluice/joined/1", 1)
        joining.result(DEADLINE_S)
    clock.now_s = LOST_S
    other.add("sluice/beat/1", 1)
    beats = other.add("sluice/beat/0", 0)
    while other.add("sluice/beat/0", 0) < beats + 2:  # the first node has looked in between
        time.sleep(0.01)
    clock.now_s += LOST_S
    assert first.num_nodes_waiting() == 0
