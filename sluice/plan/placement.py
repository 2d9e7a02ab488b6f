"""Which node and which devices each rollout replica and the trainer get: pure arithmetic on numbers of devices.

All replicas have the same size, so the greatest number fits if each node is filled. The trainer's processes are divided evenly over its
nodes, because torchrun starts the same number on each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.plan.machines import in_words


class DoesNotFitError(ValueError):
    """The machines are too small, or have the wrong shape; the message says by how much."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A node, and the numbers of devices on it; no devices for a process that computes on the CPU."""

    node: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the sides of a run, as numbers of processes.

    Attributes:
        replicas: Rollout replicas.
        replica: Processes of each replica, all on one node.
        ranks: Processes of the trainer.
        group: Number of ranks that should share a node because they communicate most (tensor parallelism).
    """

    replicas: int
    replica: int
    ranks: int
    group: int = 1


def on_devices(sizes: Sizes, devices: Sequence[int], *, shared: bool = False) -> tuple[list[Spot], list[Spot]]:
    """Give each process a device: replicas fill the nodes from the first one, the trainer takes the last nodes.

    Args:
        sizes: Sizes; zero replicas or zero ranks if that side computes on the CPU.
        devices: Devices of each node.
        shared: Whether the trainer uses the devices of the replicas.

    Returns:
        One spot for each replica, and one for each node of the trainer, in the order of its node ranks.

    Raises:
        DoesNotFitError: with the numbers.
    """
    nodes = len(devices)
    if sizes.replicas and sizes.replica > max(devices):
        raise DoesNotFitError(
            f"a rollout replica needs {sizes.replica} devices on one node, and a node has {max(devices)}: use smaller replicas"
            " (`t` of an allocation, rollout.engine_args.tensor_parallel_size), or larger nodes"
        )
    spans = _spans(sizes, devices, shared=shared)
    for span in spans:
        share = sizes.ranks // span if span else 0
        taken = [0 if shared or node < nodes - span else share for node in range(nodes)]
        rooms = [(has - each) // sizes.replica for has, each in zip(devices, taken, strict=True)]
        if sum(rooms) < sizes.replicas:
            continue
        replicas = _fill(rooms, sizes.replicas, sizes.replica)
        used = [0] * nodes
        for spot in [] if shared else replicas:
            used[spot.node] += sizes.replica
        first = 0 if shared else nodes - span
        trainer = [Spot(node, tuple(range(used[node], used[node] + share))) for node in range(first, first + span)]
        return replicas, trainer
    rollout = sizes.replicas * sizes.replica
    needed = max(rollout, sizes.ranks) if shared else rollout + sizes.ranks
    there = in_words(devices)
    wanted = f"{needed} devices ({sizes.replicas} x {sizes.replica} for rollout, {sizes.ranks} for the trainer)"
    if needed > sum(devices):
        raise DoesNotFitError(f"it needs {wanted}, and there are {there}: use fewer, or more machines")
    if not spans:
        raise DoesNotFitError(
            f"{sizes.ranks} ranks of the trainer cannot be divided evenly over {there} devices: use another"
            " number of ranks, or other machines"
        )
    raise DoesNotFitError(
        f"it needs {wanted}, and there are {there}, but what the trainer leaves of each node does not hold whole replicas of"
        f" {sizes.replica}: use smaller replicas, or more machines"
    )


def _spans(sizes: Sizes, devices: Sequence[int], *, shared: bool) -> list[int]:
    """Return the numbers of nodes that the trainer may span, the best first: those that split no group, then the smallest numbers."""
    if not sizes.ranks:
        return [0]
    own = devices if shared else devices[::-1]
    even = [
        span for span in range(1, len(own) + 1) if sizes.ranks % span == 0 and sizes.ranks // span <= min(own[:span])
    ]
    return sorted(even, key=lambda span: (bool(sizes.ranks // span % sizes.group), span))


def _fill(rooms: Sequence[int], replicas: int, size: int) -> list[Spot]:
    places = [(node, number) for node, room in enumerate(rooms) for number in range(room)]
    return [Spot(node, tuple(range(number * size, (number + 1) * size))) for node, number in places[:replicas]]


def on_cores(sizes: Sizes, cores: Sequence[int]) -> tuple[list[Spot], list[Spot]]:
    """Divide processes that compute on the CPU over the nodes: the trainer on the last nodes, replicas on the least loaded ones.

    Cores may be shared, so this always fits.

    Returns:
        One spot for each replica, and one for each node of the trainer.
    """
    nodes = len(cores)
    even = [span for span in range(1, nodes + 1) if sizes.ranks % span == 0] if sizes.ranks else [0]
    span = next((each for each in even if sizes.ranks <= sum(cores[nodes - each :])), even[-1])
    loads = [0] * nodes
    trainer = [Spot(node) for node in range(nodes - span, nodes)]
    for spot in trainer:
        loads[spot.node] += sizes.ranks // span
    replicas = []
    for _ in range(sizes.replicas):
        node = loads.index(min(loads))
        loads[node] += sizes.replica
        replicas.append(Spot(node))
    return replicas, trainer
