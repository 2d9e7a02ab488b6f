"""A plan on a Ray cluster: bundles of a placement group, and one actor for each process that a bundle holds.

Each replica, each gateway and each node of the trainer has a bundle of its own, so that it can be lost and placed again without the
others. Weight service and orchestrator share one bundle, so that they have one disk, as on one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.config import ConfigError
from sluice.plan.plan import COMPUTES, Part, Plan

CONTROL = "control"
"""Name of the bundle of the parts that compute nothing."""

CONTROL_CPUS = 1.0
"""CPUs of that bundle. Its parts mostly wait for sockets."""

PIN = 0.001
"""Amount of a node's own resource that a bundle requests so that it is placed on that node."""

PEERS = {
    "trainer": ("weightsync",),
    "rollout": ("weightsync", "orchestrator"),
    "orchestrator": ("trainer",),
    "gateway": ("orchestrator",),
    "agents": ("gateway",),
}
"""For each part, the parts whose addresses it reads at start. It is restarted when one of these has moved to another node. The
orchestrator is not restarted for replicas: they announce themselves."""

FIXED_PORTS = ("gateway",)
"""Parts that listen on the ports of the settings, since agents must know them. The others take free ports, because other runs may use
the same node."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources that Ray reserves on one node.

    Attributes:
        name: Name for people.
        cpus: Logical CPUs.
        gpus: GPUs.
        keeps_state: Whether its processes need the run's directory.
        node: Address of the node that it must be on; empty for any node.
    """

    name: str
    cpus: float
    gpus: int = 0
    keeps_state: bool = False
    node: str = ""

    @property
    def resources(self) -> dict[str, float]:
        """The resources as Ray names them. Each node has one unit of a resource with its address."""
        amounts = {"CPU": self.cpus, "GPU": float(self.gpus)}
        if self.node:
            amounts[f"node:{self.node}"] = PIN
        return {name: amount for name, amount in amounts.items() if amount}


@dataclass(frozen=True, slots=True)
class Seat:
    """One process, or one launcher of ranks, that an actor holds.

    Attributes:
        name: Unique in the run, such as ``rollout-1`` or, for the second node of a trainer, ``trainer.1``.
        part: The part that it belongs to.
        instance: Name of the instance.
        rank: Number of the node among the nodes of the instance.
        bundle: Number of its bundle.
        cpus: Logical CPUs of its actor.
        ports: Names of its ports, each with the required number; 0 for any free port.
    """

    name: str
    part: Part
    instance: str
    rank: int
    bundle: int
    cpus: float
    ports: Mapping[str, int]


def seat(plan: Plan, pin: str = "") -> tuple[list[Bundle], list[Seat]]:
    """Return the bundles of a plan, and the processes in them.

    Args:
        plan: The plan.
        pin: Address of the node for parts that keep state; empty for any node.

    Raises:
        ConfigError: if parts share GPUs: an actor has GPUs of its own.
    """
    if plan.shares_devices:
        raise ConfigError(
            "trainer and replicas share GPUs in this plan, but on Ray each actor has GPUs of its own: give each side its devices, such as"
            " --allocation-mode vllm:d2+fsdp:d2"
        )
    control = [part for part in plan.parts if part.name not in COMPUTES and part.keeps_state]
    bundles = [Bundle(CONTROL, CONTROL_CPUS, keeps_state=True, node=pin)]
    seats = []
    for place in plan.places:
        part = plan.part(place.part)
        name = f"{place.instance}.{place.rank}" if place.rank else place.instance
        ports = {each.name: each.number if part.name in FIXED_PORTS else 0 for each in place.ports}
        if part in control:
            number, cpus = 0, CONTROL_CPUS / len(control)
        else:
            number, cpus = len(bundles), float(part.processes)
            bundles.append(Bundle(name, cpus, part.devices, part.keeps_state, pin if part.keeps_state else ""))
        seats.append(Seat(name, part, place.instance, place.rank, number, cpus, ports))
    return bundles, seats


def left_over(plan: Plan) -> str:
    """Return a line about the GPUs of the cluster that the run does not use; empty if it uses all."""
    if not plan.unused_devices:
        return ""
    return (
        f"{plan.unused_devices} of {sum(plan.machines.devices)} GPUs of the cluster are left to other jobs: set allocation_mode, or"
        " --replicas and trainer.parallel, if this run should take more"
    )


def unplaced(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> list[Bundle]:
    """Place bundles on nodes, the largest first, and return those that do not fit.

    Args:
        bundles: The bundles to place.
        nodes: Resources of each node.
    """
    left = [dict(each) for each in nodes]
    over = []
    for bundle in sorted(bundles, key=lambda each: (-each.gpus, -each.cpus)):
        for node in left:
            if all(node.get(name, 0.0) >= amount for name, amount in bundle.resources.items()):
                for name, amount in bundle.resources.items():
                    node[name] -= amount
                break
        else:
            over.append(bundle)
    return over


def render(plan: Plan, pin: str = "") -> str:
    """Return the bundles of a plan and the actors in each, as text."""
    bundles, seats = seat(plan, pin)
    lines = []
    for number, bundle in enumerate(bundles):
        held = ", ".join(each.name for each in seats if each.bundle == number)
        wants = ", ".join(f"{amount:g} {name}" for name, amount in bundle.resources.items())
        lines.append(f"bundle {number:<3} {wants:<16} {'keeps state  ' if bundle.keeps_state else ''}{held}")
    return "\n".join(lines) + "\n"
