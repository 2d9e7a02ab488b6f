"""What a run starts on this machine: its children, each with command, environment, port, processes and devices.

Pure, except that `choose_addresses` asks the system for ports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sluice.config import ConfigError, PeersConfig, RunConfig, ServerConfig, allocation_of
from sluice.config.decide import VISIBLE
from sluice.rpc.channel import wait_until_serving
from sluice.rpc.server import LOOPBACK, free_ports
from sluice.supervise import rank_launcher
from sluice.supervise.supervisor import ChildSpec

HAS_HTTP = frozenset({"rollout", "gateway"})
"""Services with an HTTP port beside the gRPC one."""

COMPUTES = frozenset({"trainer", "rollout"})
"""Services that keep cores busy; the others wait for sockets."""

MAY_LEAVE = {"rollout": "was drained and is not started again", "agents": "has ended: the run has no more episodes"}
"""Services that may end before the run does, and why."""

MOST_PROCESSES = 1024
"""More computing processes on one machine are a mistake in the settings."""

RANKS_MARGIN_S = 1.0
"""Seconds that the ranks of a trainer get beyond its drain: less than the supervisor's margin, so that the launcher ends last."""

_SHARED_CORES = {
    # Two processes whose OpenMP threads spin on the same cores slow each other down more than tenfold.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    # What libraries announce to their developers does not belong in the run's logs.
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
}


def replicas_of(flag: int | None, config: RunConfig) -> int:
    """Return the number of rollout replicas of a run: the value of `--replicas`, or if that is None the settings'.

    Raises:
        ConfigError: if it is 0, or the settings contradict each other.
    """
    allocation = allocation_of(config)
    named = len(config.peers.rollout)
    if allocation is not None and allocation.rollout is not None:
        replicas = allocation.rollout.dimensions.data
        listed = named if "rollout" in config.peers.model_fields_set else replicas
        for setting, number in (("--replicas", flag or replicas), ("the length of peers.rollout", listed)):
            if number != replicas:
                raise ConfigError(
                    f"the allocation {allocation} has {replicas} replicas, but {setting} is {number}: remove one of them"
                )
        return replicas
    if not (flag or named):
        raise ConfigError("peers.rollout is empty: a run needs at least one rollout replica (--replicas 1)")
    return flag or named


@dataclass(frozen=True, slots=True)
class Place:
    """The processes and devices of one child.

    Attributes:
        processes: Processes that compute. Each gets its share of the cores, and one device if the child has devices.
        devices: Names of its devices; None leaves it all devices that the supervisor sees.
    """

    processes: int
    devices: tuple[str, ...] | None = None


def assign_devices(run: RunConfig, replicas: Sequence[str], devices: Sequence[str]) -> Mapping[str, Place]:
    """Assign processes and devices to the children that compute.

    With an allocation, or if there are enough devices, every child gets its own: replicas first, then the trainer; both get
    the same ones if the allocation says so. Otherwise all children share all devices.

    On a CPU there are no `devices`, and none is assigned.

    Returns:
        The place of each replica and of ``trainer``.

    Raises:
        ConfigError: if the allocation, or the trainer alone, needs more devices than there are, or a service asks for CUDA and
            there is no device.
    """
    allocation = allocation_of(run)
    processes = {child: run.section(service_of(child)).processes() for child in (*replicas, "trainer")}
    if sum(processes.values()) > MOST_PROCESSES:
        raise ConfigError(
            f"the trainer and {len(replicas)} replicas need {sum(processes.values())} processes ({processes['trainer']} for the trainer),"
            f" more than the {MOST_PROCESSES} that one machine may run: use fewer, or start the services on several machines"
        )
    if not devices:
        for name in ("trainer", "rollout"):
            if getattr(run.section(name), "device", None) == "cuda":
                raise ConfigError(f"{name}.device is cuda, but this machine has no CUDA device: set it to auto or cpu")
        return {child: Place(count) for child, count in processes.items()}
    wants = {
        child: 0 if getattr(run, service_of(child)).device == "cpu" else count for child, count in processes.items()
    }
    rollout = sum(wants[child] for child in replicas)
    shared = allocation is not None and allocation.shared
    needed = max(rollout, wants["trainer"]) if shared else rollout + wants["trainer"]
    if needed > len(devices):
        if allocation is None and wants["trainer"] <= len(devices):
            return {child: Place(count) for child, count in processes.items()}
        source = "trainer.parallel" if allocation is None else f"the allocation {allocation}"
        raise ConfigError(
            f"{source} needs {needed} devices, but there are {len(devices)} ({VISIBLE}={','.join(devices)}): use fewer,"
            " or start the services on several machines"
        )
    places: dict[str, Place] = {}
    taken = 0
    for child in replicas:
        places[child] = Place(processes[child], tuple(devices[taken : taken + wants[child]]) or None)
        taken += wants[child]
    begin = 0 if shared else taken
    places["trainer"] = Place(processes["trainer"], tuple(devices[begin : begin + wants["trainer"]]) or None)
    return places


@dataclass(frozen=True)
class Addresses:
    """The ports of a run on this machine.

    Attributes:
        grpc: Port by child.
        http: HTTP port by child, for children that have one.
    """

    grpc: Mapping[str, int]
    http: Mapping[str, int]

    def peers(self) -> PeersConfig:
        """Return the addresses as settings, so that the services find each other."""
        target = {name: f"{LOOPBACK}:{port}" for name, port in self.grpc.items()}
        replicas = [address for name, address in target.items() if service_of(name) == "rollout"]
        return PeersConfig(
            weightsync=target["weightsync"],
            trainer=target["trainer"],
            rollout=replicas,
            orchestrator=target["orchestrator"],
            **{name: target[name] for name in ("gateway",) if name in target},
        )


def service_of(child: str) -> str:
    """Return the service that a child runs: ``rollout-1`` runs ``rollout``."""
    return child.partition("-")[0]


def replica_names(replicas: int) -> list[str]:
    """Return the names of the children that are rollout replicas."""
    return ["rollout"] if replicas == 1 else [f"rollout-{number}" for number in range(replicas)]


def has_external_agents(run: RunConfig) -> bool:
    """Return whether agents outside of the run hold its conversations: they need a gateway."""
    return any(each.workflow == "external" for each in getattr(run.section("orchestrator"), "mix", ()))


def agent_names(run: RunConfig) -> list[str]:
    """Return the names of the children that play episodes with the class that `agents.agent` names; none without one."""
    agents: Any = getattr(run, "agents", None)
    if not getattr(agents, "agent", ""):
        return []
    workers: int = agents.workers
    return ["agents"] if workers == 1 else [f"agents-{number}" for number in range(workers)]


def choose_addresses(run: RunConfig, replicas: int) -> Addresses:
    """Choose loopback ports for all children of a run, the one that takes longest to start first.

    They are free ones, except for the gateway's: agents must know it, so it has the ports of the settings.
    """
    names = [*replica_names(replicas), "trainer", "orchestrator", "weightsync", *agent_names(run)]
    with_http = [name for name in names if service_of(name) in HAS_HTTP]
    ports = iter(free_ports(len(names) + len(with_http)))
    grpc, http = dict(zip(names, ports, strict=False)), dict(zip(with_http, ports, strict=True))
    if has_external_agents(run):
        server: ServerConfig = run.section("gateway").server  # type: ignore[attr-defined]  # a field of a package that this one does not import
        free = free_ports(2)
        grpc["gateway"], http["gateway"] = server.port or free[0], server.http_port or free[1]
    return Addresses(grpc, http)


def child_environment(child: str, threads: int | None, processes: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a child; those that the user has set stay as they are.

    Without `threads` the computing processes divide the cores. `given` is the environment that the child inherits.
    """
    share = max(1, len(os.sched_getaffinity(0)) // processes) if hasattr(os, "sched_getaffinity") else 1
    count = 1 if service_of(child) not in COMPUTES else threads or share
    environment = shared_cores(given)
    if threads is not None or "OMP_NUM_THREADS" not in given:
        environment["OMP_NUM_THREADS"] = str(count)
    return environment


def shared_cores(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of any program that shares its cores; those that the user has set stay as they are."""
    return {name: value for name, value in _SHARED_CORES.items() if name not in given}


def child_specs(
    run: RunConfig,
    addresses: Addresses,
    settings: Path,
    log_dir: Path,
    *,
    threads: int | None,
    places: Mapping[str, Place],
) -> list[ChildSpec]:
    """Return the children of a run, to be started in this order.

    The children read the file `settings`. Without `threads` the computing processes divide the cores.
    """
    computing = sum(each.processes for each in places.values())
    specs = []
    for name, port in addresses.grpc.items():
        place, service = places.get(name, Place(1)), service_of(name)
        drain_s: float = getattr(run.section(service), "server").drain_s  # noqa: B009 - a field of a package that this one does not import
        program = ["sluice.cli.main"]
        forks = sys.platform == "linux"
        if service == "trainer" and place.processes > 1:
            forks = False
            program = [rank_launcher.__name__, str(place.processes), str(drain_s + RANKS_MARGIN_S)]
        arguments = [service, "@", str(settings), "--server.host", LOOPBACK, "--server.port", str(port)]
        if name in addresses.http:
            arguments += ["--server.http-port", str(addresses.http[name])]
        if service == "rollout":
            arguments += ["--replica", name]
        environment = child_environment(name, threads, computing, os.environ)
        if place.devices is not None:
            environment[VISIBLE] = ",".join(place.devices)
        specs.append(
            ChildSpec(
                name=name,
                argv=(sys.executable, "-m", *program, *arguments),
                fork_server=(sys.executable, "-m", "sluice.cli.fork_server", *arguments) if forks else (),
                log_path=log_dir / f"{name}.log",
                wait_ready=partial(wait_until_serving, f"{LOOPBACK}:{port}", run.security),
                environment=environment,
                ends_run=service == "orchestrator",
                may_leave=MAY_LEAVE.get(service, ""),
                drain_s=drain_s,
            )
        )
    return specs
