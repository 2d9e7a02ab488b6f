"""A Ray cluster of four nodes inside a network namespace of its own, for `test_ray.py`: `unshare --net python ray_cluster.py GPUS`.

Each node has an address of its own, 10.77.0.1 to 10.77.0.4, all on the loopback device of the namespace. The first is the head, which has
nothing to give, as on Kubernetes; each other one says that it has four CPUs and so many GPUs. Commands come on standard input, one a line, and each is
answered by a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

ADDRESSES = [f"10.77.0.{number}" for number in range(1, 5)]
HEAD = ADDRESSES[0]
DASHBOARD_PORT = 8265

_CPUS = 4
_START_S = 120
"""Seconds that a node may take to join; Ray's own 30 are not enough on two busy cores."""

_OBJECT_STORE_BYTES = 80 << 20


def _network() -> None:
    for words in (
        "link set lo up",
        *(f"address add {each}/32 dev lo" for each in ADDRESSES),
        # Ray takes the address by which it would reach this one for its own. Names are looked up elsewhere, which fails at once.
        f"route add 8.8.8.8 dev lo src {HEAD}",
    ):
        subprocess.run(["ip", *words.split()], check=True)


class Nodes:
    """The cluster, and what its commands do."""

    def __init__(self, gpus: int) -> None:
        self._cluster = Cluster()
        self._nodes = {}
        for address in ADDRESSES:
            work = address != HEAD
            self._nodes[address] = self._cluster.add_node(
                node_ip_address=address,
                num_cpus=_CPUS * work,
                num_gpus=gpus * work,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=not work,
                dashboard_host=HEAD,
                dashboard_port=DASHBOARD_PORT,
            )
        self.address = self._cluster.address

    def kill(self, address: str) -> str:
        """Kill a node, without a word to the others."""
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)
        return address

    def created(self) -> dict[str, int]:
        """Return how many objects and bytes were ever put into the object stores of the nodes that live."""
        stats = [node_stats(address, node.node_manager_port).store_stats for address, node in self._nodes.items()]
        return {
            "objects": sum(each.cumulative_created_objects for each in stats),
            "bytes": sum(each.cumulative_created_bytes for each in stats),
        }

    def memory(self) -> dict[str, int]:
        """Return the bytes that all processes of the cluster use, ours among them; a page that several share counts once."""
        sizes = {"ray": 0, "sluice": 0}
        for process in psutil.Process().children(recursive=True):
            try:
                ours = "sluice.cli.main" in process.cmdline()
                sizes["sluice" if ours else "ray"] += process.memory_full_info().pss
            except psutil.Error:
                continue
        return sizes


def main(gpus: int) -> None:
    """Start the cluster, and do what standard input says until it ends."""
    _network()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_raylet_start_wait_time_s"] = str(_START_S)  # noqa: SIM112 - Ray spells it so
    nodes = Nodes(gpus)
    print(json.dumps({"address": nodes.address}), flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        answer = {"kill": nodes.kill, "created": nodes.created, "memory": nodes.memory}[command](*words)
        print(json.dumps(answer), flush=True)
    nodes._cluster.shutdown()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(int(sys.argv[1]))
