"""From a run's settings to the child processes that are the run."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.cli.child_process import ChildSpec
from sluice.cli.placement import Place
from sluice.config import PeersConfig, RunConfig, SecurityConfig
from sluice.devices import VISIBLE
from sluice.rpc import connect

__all__ = [
    "Addresses",
    "child_environment",
    "child_specs",
    "free_addresses",
    "replica_names",
    "serves",
    "service_of",
    "shared_cores",
]

LOOPBACK = "127.0.0.1"

_PROBE_S = 0.1
"""Pause between two looks at a child that does not serve yet, in seconds."""

_PROBE_DEADLINE_S = 5.0

HAS_HTTP = frozenset({"rollout"})
"""Services with an HTTP port beside the gRPC one."""

COMPUTES = frozenset({"trainer", "rollout"})
"""Services that keep cores busy; the others wait for sockets."""

_SHARED_CORES = {
    # Two processes whose OpenMP threads spin on the same cores slow each other down more than tenfold.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    # What libraries announce to their developers is not for the run's logs.
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
}


@dataclass(frozen=True)
class Addresses:
    """Ports of one run on this machine.

    Attributes:
        grpc: Port by child.
        http: HTTP port by child, for children that have one.
    """

    grpc: Mapping[str, int]
    http: Mapping[str, int]

    def peers(self) -> PeersConfig:
        """Where the services find each other."""
        target = {name: f"{LOOPBACK}:{port}" for name, port in self.grpc.items()}
        replicas = [address for name, address in target.items() if service_of(name) == "rollout"]
        return PeersConfig(
            weightsync=target["weightsync"],
            trainer=target["trainer"],
            rollout=replicas,
            orchestrator=target["orchestrator"],
        )


def service_of(child: str) -> str:
    """The service that a child runs: ``rollout-1`` runs ``rollout``."""
    return child.partition("-")[0]


def replica_names(replicas: int) -> list[str]:
    """Children of a run that are rollout replicas."""
    return ["rollout"] if replicas == 1 else [f"rollout-{number}" for number in range(replicas)]


def child_names(replicas: int) -> list[str]:
    """Children of a run, the one that takes longest to start first."""
    return [*replica_names(replicas), "trainer", "orchestrator", "weightsync"]


def free_addresses(replicas: int) -> Addresses:
    """Find free loopback ports, all different."""
    names = child_names(replicas)
    with_http = [name for name in names if service_of(name) in HAS_HTTP]
    sockets = [socket.socket() for _ in [*names, *with_http]]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        ports = [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
    return Addresses(
        dict(zip(names, ports[: len(names)], strict=True)), dict(zip(with_http, ports[len(names) :], strict=True))
    )


def child_environment(child: str, threads: int | None, processes: int, given: Mapping[str, str]) -> dict[str, str]:
    """Variables of a child, where the user has not set them.

    Args:
        child: Its name.
        threads: Threads per computing process; None divides the cores.
        processes: Number of processes that compute.
        given: The environment that the child inherits.
    """
    share = max(1, len(os.sched_getaffinity(0)) // processes) if hasattr(os, "sched_getaffinity") else 1
    count = 1 if service_of(child) not in COMPUTES else threads or share
    environment = shared_cores(given)
    if threads is not None or "OMP_NUM_THREADS" not in given:
        environment["OMP_NUM_THREADS"] = str(count)
    return environment


def shared_cores(given: Mapping[str, str]) -> dict[str, str]:
    """Variables of any program that computes beside others, where the user has not set them.

    Args:
        given: The environment that it inherits.
    """
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
    """What to start.

    Args:
        run: Settings of the run.
        addresses: Its ports.
        settings: The file that the children read.
        log_dir: Where their logs go, one file per child.
        threads: Threads per computing process; None divides the cores.
        places: Processes and devices of the children that compute.
    """
    computing = sum(each.processes for each in places.values())
    specs = []
    for name, port in addresses.grpc.items():
        place = places.get(name, Place(1))
        argv = [*_program(name, place), service_of(name), "@", str(settings)]
        argv += ["--server.host", LOOPBACK, "--server.port", str(port)]
        if name in addresses.http:
            argv += ["--server.http-port", str(addresses.http[name])]
        if service_of(name) == "rollout":
            argv += ["--replica", name]
        specs.append(
            ChildSpec(
                name=name,
                argv=tuple(argv),
                log_path=log_dir / f"{name}.log",
                serves=_probe(f"{LOOPBACK}:{port}", run.security),
                environment=child_environment(name, threads, computing, os.environ) | _devices(place),
                ends_run=name == "orchestrator",
            )
        )
    return specs


def _program(child: str, place: Place) -> list[str]:
    """What runs a child's command; the trainer of several processes runs under torchrun."""
    if service_of(child) == "trainer" and place.processes > 1:
        return [sys.executable, "-m", "sluice.cli.torchrun", str(place.processes)]
    return [sys.executable, "-m", "sluice.cli.main"]


def _devices(place: Place) -> dict[str, str]:
    return {} if place.devices is None else {VISIBLE: ",".join(place.devices)}


def _probe(target: str, security: SecurityConfig) -> Callable[[], Awaitable[None]]:
    return lambda: serves(target, security)


async def serves(target: str, security: SecurityConfig) -> None:
    """Return once a server answers SERVING; the caller sets the deadline."""
    host, _, port = target.rpartition(":")
    while True:
        # A look at the socket costs nothing, and leaves gRPC's reconnection back-off out of the start.
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(_PROBE_S)
            continue
        writer.close()
        if await _answers_serving(target, security):
            return
        await asyncio.sleep(_PROBE_S)


async def _answers_serving(target: str, security: SecurityConfig) -> bool:
    async with connect(target, security, role="agent") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_DEADLINE_S)  # type: ignore[attr-defined]  # the stubs leave it out
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
