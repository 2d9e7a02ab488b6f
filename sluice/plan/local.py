"""The plan for one machine: the children that `sluice rl` starts, on loopback ports that are free now.

Pure, except that `on_free_ports` asks the system for ports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sluice.config import PeersConfig, RunConfig, ServerConfig
from sluice.config.decide import VISIBLE, smallest_memory
from sluice.plan.machines import GB, Machines
from sluice.plan.plan import COMPUTES, Part, Place, Plan, Port, Restart
from sluice.rpc.channel import wait_until_serving
from sluice.rpc.server import LOOPBACK, free_ports
from sluice.supervise.supervisor import ChildSpec, LogLimit

HOSTS = (LOOPBACK,)
"""Host names of the one machine, by which the services reach each other."""

KNOWN = ("gateway", "tuner")
"""Parts that programs outside of the plan call. They listen at the host and the ports of their settings; the others on loopback."""

_SERVICES = {"relay": "weightsync"}
"""Services of the parts whose names differ from their service's."""

METRICS = "metrics"
"""Name of the port that serves Prometheus metrics."""

_WILDCARDS = frozenset({"0.0.0.0", "::"})

LEFT = {"rollout": "was drained and is not started again", "agents": "has ended: the run has no more episodes"}
"""By service, why the run continues after such a child ended with exit code 0, for people."""

_SHARED_CORES = {
    # Two processes whose OpenMP threads spin on the same cores slow each other down more than tenfold.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    # Warnings for developers of the libraries do not belong in the run's logs.
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
}


def this_machine(devices: Sequence[str]) -> Machines:
    """Return this machine, with the CUDA devices that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = smallest_memory() if devices else None
    return Machines.alike(devices=len(devices), cores=cores, device_gb=None if memory is None else memory / GB)


def on_free_ports(plan: Plan, run: RunConfig) -> Plan:
    """Return the plan on loopback ports that were free a moment ago, so that several runs can share a machine.

    Ports of metrics that the settings name stay, since others must know them. So do the ports of `KNOWN` parts, unless they are 0.
    """
    if run.metrics_ports:
        plan = _with_metrics(plan)
    planned = {(place.instance, port.name): port.number for place in plan.places for port in place.ports}
    moved = [(place.instance, name) for place in plan.places for name in free_names(place, run)]
    return plan.with_ports(planned | dict(zip(moved, free_ports(len(moved)), strict=True)))


def _with_metrics(plan: Plan) -> Plan:
    """Return the plan with a port of metrics (any free number) for each instance that has none."""
    places = tuple(
        replace(each, ports=(*each.ports, Port(METRICS, 0)))
        if each.ports and METRICS not in {port.name for port in each.ports}
        else each
        for each in plan.places
    )
    return replace(plan, places=places)


def free_names(place: Place, run: RunConfig) -> list[str]:
    """Return the names of the ports of a place whose numbers nobody has to know beforehand."""
    server = _server(run, _SERVICES.get(place.part, place.part))
    known: dict[str, int | None] = {METRICS: server.metrics_port}
    if place.part in KNOWN:
        known |= {"grpc": server.port, "http": server.http_port}
    return [each.name for each in place.ports if not known.get(each.name)]


def metrics_targets(plan: Plan, run: RunConfig) -> list[dict[str, Any]]:
    """Return the metrics targets of a plan's services, in the format that Prometheus reads from a file (`file_sd_configs`)."""
    scheme = "http" if run.security.tls_cert is None else "https"
    targets = []
    for place in plan.places:
        if METRICS not in {port.name for port in place.ports}:
            continue
        service = plan.part(place.part).service
        host = _server(run, service).metrics_host
        host = LOOPBACK if host in _WILDCARDS else host
        shown = f"[{host}]" if ":" in host else host
        labels = {"run": run.run, "service": service, "replica": place.instance, "__scheme__": scheme}
        targets.append({"targets": [f"{shown}:{place.port(METRICS)}"], "labels": labels})
    return targets


def unused_ports(plan: Plan, run: RunConfig) -> list[str]:
    """Return one line for each port in the settings that is not used because the service gets a free port instead."""
    lines = []
    for service in sorted({part.service for part in plan.parts} - {*KNOWN}):
        section = run.section(service)
        given, usual = (getattr(each, "server", None) for each in (section, type(section)()))
        if not isinstance(given, ServerConfig):
            continue
        lines += [
            f"{service}.server.{name} = {number} is not used: on one machine each service gets a free port, so that several runs fit"
            " beside each other; `peers` of the run's config.toml has the addresses"
            for name in ("port", "http_port")
            if (number := getattr(given, name)) and number != getattr(usual, name)
        ]
    return lines


def known_host(run: RunConfig, part: str) -> str:
    """Return the host on which a part listens: for `KNOWN` parts that of the settings, since callers may be elsewhere."""
    return _server(run, part).host if part in KNOWN else LOOPBACK


def _server(run: RunConfig, service: str) -> ServerConfig:
    server: ServerConfig = run.section(service).server  # type: ignore[attr-defined]  # a field of a package that this one does not import
    return server


def local_peers(plan: Plan, run: RunConfig) -> PeersConfig:
    """Return the addresses at which the services of a plan for this machine reach each other."""
    peers = plan.peers(HOSTS)
    if not plan.has("gateway"):
        return peers
    return peers.model_copy(update={"gateway": _address(plan.place("gateway"), run)})


def _address(place: Place, run: RunConfig) -> str:
    host = known_host(run, place.part)
    return f"{LOOPBACK if host in _WILDCARDS else host}:{place.port()}"


def child_environment(part: Part, given: Mapping[str, str], *, own_threads: bool = False) -> dict[str, str]:
    """Return the environment variables of a child. Variables that the user has set stay as they are.

    Args:
        part: What the child runs.
        given: The environment that it inherits.
        own_threads: Whether the user gave the number of threads as a flag, which overrides a variable.
    """
    environment = shared_cores(given)
    if own_threads or "OMP_NUM_THREADS" not in given:
        environment["OMP_NUM_THREADS"] = str(part.threads)
    return environment


def shared_cores(given: Mapping[str, str]) -> dict[str, str]:
    """Return variables to add for a program that shares its cores with others. Variables that the user has set are left out."""
    return {name: value for name, value in _SHARED_CORES.items() if name not in given}


def load_first(plan: Plan, part: Part) -> list[Part]:
    """Return the parts that must serve before a part starts, because both use the same GPUs, and these parts must load first."""
    if not plan.shares_devices or not part.devices:
        return []
    return [plan.part(each) for each in part.waits_for if each in COMPUTES]


def child_specs(
    plan: Plan, run: RunConfig, settings: Path, log_dir: Path, *, devices: Sequence[str] = (), own_threads: bool = False
) -> list[ChildSpec]:
    """Return the children of a run. They start in parallel, the slowest first. On GPUs that both sides use, the trainer loads first.

    Args:
        plan: For one machine.
        run: The settings that the plan was made of.
        settings: File that the children read.
        log_dir: Directory of their logs.
        devices: Names of the machine's CUDA devices.
        own_threads: Whether the user gave the number of threads as a flag.
    """
    specs = []
    for place in sorted(plan.places, key=lambda place: place.part not in COMPUTES):
        part = plan.part(place.part)
        flags = ["@", str(settings), "--server.host", known_host(run, place.part), *place.port_flags()]
        _, *words = part.command(flags, instance=place.instance)
        environment = child_environment(part, os.environ, own_threads=own_threads)
        if place.devices:
            environment[VISIBLE] = ",".join(devices[number] for number in place.devices)
        forks = sys.platform == "linux" and not part.ranked
        address = _address(place, run)
        leaves = part.restart is Restart.ON_FAILURE and not part.ends_run
        specs.append(
            ChildSpec(
                name=place.instance,
                argv=(sys.executable, "-m", "sluice.cli.main", *words),
                fork_server=(sys.executable, "-m", "sluice.cli.fork_server", *words) if forks else (),
                log_path=log_dir / f"{place.instance}.log",
                wait_ready=partial(wait_until_serving, address, run.security),
                environment=environment,
                ends_run=part.ends_run,
                may_leave=LEFT[part.service] if leaves else "",
                after=tuple(name for each in load_first(plan, part) for name in each.instances),
                address=address,
                start_s=part.start_s,
                drain_s=part.drain_s,
                log_limit=LogLimit(run.log_mb << 20, run.log_files),
            )
        )
    return specs
