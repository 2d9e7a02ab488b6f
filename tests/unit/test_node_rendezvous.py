"""How the nodes of a trainer find each other, without ranks: threads stand for machines."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from sluice.rpc.server import free_ports
from sluice.supervise.node_rendezvous import NodeRendezvous, Nodes, NodesMissingError

DEADLINE_S = 30.0


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


def node(
    rank: int, port: int, *, count: int = 2, join_s: float = DEADLINE_S, lost_s: float = DEADLINE_S
) -> NodeRendezvous:
    return NodeRendezvous(Nodes(count, rank, "127.0.0.1", port, join_s, lost_s), "ranks")


def test_nodes_that_all_come_get_the_ranks_of_their_numbers(port: int) -> None:
    nodes = [node(rank, port, count=3) for rank in (2, 0, 1)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(NodeRendezvous.next_rendezvous, nodes))
    assert [(each.rank, each.world_size) for each in found] == [(2, 3), (0, 3), (1, 3)]
    addresses = {(each.bootstrap_store_info.master_addr, each.bootstrap_store_info.master_port) for each in found}
    assert addresses == {("127.0.0.1", port)}


def test_the_first_node_says_how_many_joined_and_which_are_missing(port: int) -> None:
    with ThreadPoolExecutor(2) as threads:
        joins = [threads.submit(node(rank, port, count=4, join_s=1.0).next_rendezvous) for rank in (0, 2)]
        for join in joins:
            with pytest.raises(
                NodesMissingError, match=rf"2 of 4 nodes joined at 127\.0\.0\.1:{port} within 1 s: node 1, 3 did not"
            ):
                join.result(DEADLINE_S)


def test_a_node_without_the_first_one_names_its_address(port: int) -> None:
    with pytest.raises(
        NodesMissingError, match=f"node 1 of 2 did not join the first node at 127.0.0.1:{port} within 0.5 s"
    ):
        node(1, port, join_s=0.5).next_rendezvous()


def test_a_node_that_was_restarted_alone_does_not_join_the_ranks_before(port: int) -> None:
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(NodeRendezvous.next_rendezvous, [before := node(0, port), node(1, port)]))
        with pytest.raises(NodesMissingError, match="the ranks before still run there"):
            node(1, port, join_s=0.5).next_rendezvous()
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
    first = node(0, port, lost_s=0.5)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(first.next_rendezvous)
        TCPStore("127.0.0.1", port, timeout=timedelta(seconds=DEADLINE_S)).add("sluice/joined/1", 1)
        joining.result(DEADLINE_S)
    with pytest.raises(NodesMissingError, match=r"node 1 of 2 gave no sign of life for 0\.5 s"):
        look_until(first, time.monotonic() + DEADLINE_S)


def look_until(rendezvous: NodeRendezvous, end: float) -> None:
    """As the launcher does, which looks several times a second."""
    while time.monotonic() < end:
        rendezvous.num_nodes_waiting()
