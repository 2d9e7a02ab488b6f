"""How the machines of one trainer find each other at start, and notice that one of them is gone.

The first node serves a key-value store, which the ranks use later, too. Nodes are ordered by their numbers, so that rank 0 is on the node
that the settings name. torchrun's own rendezvous orders nodes by their addresses, and guesses the first one by its host name, which
containers and network namespaces share.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import psutil
from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

BACKEND = "sluice"

_BEATS = 6
"""Signs of life within `Nodes.lost_s`."""

_CONNECT_S = 5.0
"""Longest single attempt to connect to the first node."""

_AGAIN_S = 0.5
"""Pause before a node tries to join again."""


class NodesMissingError(Exception):
    """Not all nodes joined in time, or one is gone; the message names it and the rendezvous."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a trainer, seen from one of them.

    Attributes:
        count: How many there are.
        rank: The number of this one.
        host: Where this one reaches the first node.
        port: The port of the rendezvous; 0 takes a free one, for a single node.
        join_s: Seconds within which all must join.
        lost_s: Seconds without a sign of life after which a node counts as gone. At least the time of a drain, in which a node is silent.
    """

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    join_s: float = 600.0
    lost_s: float = 30.0

    def __str__(self) -> str:
        """Return the address of the rendezvous."""
        return f"{self.host}:{self.port}"

    def interface(self) -> str:
        """Return the name of the network interface through which this node reaches the first one; empty if it is not known.

        Raises:
            OSError: if the host cannot be resolved.
        """
        if self.rank:
            family, kind, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:  # connecting it sends nothing
                probe.connect(address)
                own = {probe.getsockname()[0]}
        else:
            own = {each[4][0] for each in socket.getaddrinfo(self.host, self.port)}
        for name, addresses in psutil.net_if_addrs().items():
            if own & {each.address for each in addresses}:
                return name
        return ""


class NodeRendezvous(RendezvousHandler):  # type: ignore[misc]  # its module is not typed
    """Joins the nodes once. Afterwards the launcher asks it several times a second whether all are still there.

    Args:
        nodes: The nodes.
        run_id: Prefix of the launcher's own keys.
        clock: Seconds, monotonic.
    """

    def __init__(self, nodes: Nodes, run_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes, self._run_id, self._clock = nodes, run_id, clock
        self._store: TCPStore | None = None
        self._seen: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes have joined.

        Raises:
            NodesMissingError: if they have not joined by the deadline.
        """
        deadline = self._clock() + self._nodes.join_s
        store = self._join(deadline)
        keys = [_joined(rank) for rank in range(self._nodes.count)]
        try:
            store.wait(keys, timedelta(seconds=max(0.001, deadline - self._clock())))
        except DistError as error:
            raise NodesMissingError(self._who_is_missing(store, keys)) from error
        self._store = store  # the ranks use it as long as the launcher lives
        if self._nodes.count > 1:
            others = (rank for rank in range(self._nodes.count) if rank != self._nodes.rank)
            self._seen = dict.fromkeys(others, (0, self._clock()))
            threading.Thread(target=self._exchange_signs, args=(store.port,), name="signs of life", daemon=True).start()
        return RendezvousInfo(
            PrefixStore(self._run_id, store),
            self._nodes.rank,
            self._nodes.count,
            RendezvousStoreInfo(self._nodes.host, store.port),
        )

    def _join(self, deadline: float) -> TCPStore:
        """Serve or reach the store, and note there that this node has joined.

        A node that was restarted alone may find the store of the previous ranks. These end soon, because they lost the ranks of this node.
        """
        nodes = self._nodes
        while True:
            left_s = deadline - self._clock()
            reason = "the ranks before still run there"
            try:
                timeout = timedelta(seconds=max(0.1, min(_CONNECT_S, left_s)))
                store = TCPStore(
                    nodes.host, nodes.port, is_master=nodes.rank == 0, timeout=timeout, wait_for_workers=False
                )
                if store.add(_joined(nodes.rank), 1) == 1:
                    return store
            except DistError as error:
                reason = str(error).partition("\n")[0].partition(". ")[0]
                if nodes.rank == 0:
                    raise NodesMissingError(
                        f"cannot listen at {nodes} for the other nodes: {reason}; use another port"
                        " (trainer.parallel.rendezvous_port), or end what uses it"
                    ) from error
            if self._clock() + _AGAIN_S >= deadline:
                raise NodesMissingError(
                    f"node {nodes.rank} of {nodes.count} did not join the first node at {nodes} within {nodes.join_s:g} s:"
                    f" {reason}; is node 0 up, and does nothing block that port?"
                )
            time.sleep(_AGAIN_S)

    def _who_is_missing(self, store: TCPStore, keys: list[str]) -> str:
        nodes = self._nodes
        absent = list(range(1, nodes.count))
        with contextlib.suppress(DistError):
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return (
            f"{nodes.count - len(absent)} of {nodes.count} nodes joined at {nodes} within {nodes.join_s:g} s: node"
            f" {', '.join(map(str, absent))} did not; start it, and see that it reaches that address"
        )

    def num_nodes_waiting(self) -> int:
        """Look whether all nodes still give signs of life. Return 0: no node joins later.

        Raises:
            NodesMissingError: if a node is gone.
        """
        nodes, now = self._nodes, self._clock()
        silent = [rank for rank, (_, at) in self._seen.items() if now - at > nodes.lost_s]
        if silent:
            # All signs come through the first node. If none comes any more, the first node is the one that cannot be reached.
            gone = [0] if nodes.rank and len(silent) == len(self._seen) else silent
            raise NodesMissingError(
                f"node {', '.join(map(str, gone))} of {nodes.count} gave no sign of life for {nodes.lost_s:g} s (rendezvous {nodes}): its machine, its"
                " launcher or the network is gone; all ranks end, and continue from the newest checkpoint once all nodes are"
                " started again"
            )
        return 0

    def _exchange_signs(self, port: int) -> None:
        """Send and receive signs of life until `shutdown`, or until the first node cannot be reached.

        The calls have no deadline, so a thread makes them.
        """
        nodes = self._nodes
        with contextlib.suppress(DistError):
            store = TCPStore(nodes.host, port, is_master=False, timeout=timedelta(seconds=nodes.lost_s))
            while not self._ended.is_set():
                store.add(_beat(nodes.rank), 1)
                for rank, (beat, _) in list(self._seen.items()):
                    current = store.add(_beat(rank), 0)
                    if current != beat:
                        self._seen[rank] = (current, self._clock())
                self._ended.wait(nodes.lost_s / _BEATS)

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store too."""
        return True

    def get_backend(self) -> str:
        """Return the name under which the launcher finds this class."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the prefix of the launcher's keys."""
        return self._run_id

    def is_closed(self) -> bool:
        """Nodes join once, so it is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def shutdown(self) -> bool:
        """Send no more signs of life. The store ends with the process."""
        self._ended.set()
        return True


def _joined(rank: int) -> str:
    return f"sluice/joined/{rank}"


def _beat(rank: int) -> str:
    return f"sluice/beat/{rank}"
