"""What a run starts, where, in which order and on which ports: a pure function of the settings and the machines.

The local supervisor, compose, Helm, Slurm and Ray, called engines here, all start what a `Plan` says. They differ only in what just the
engine knows: paths, host names, and how a process is restarted.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sluice.config import ConfigError, PeersConfig, RunConfig, ServerConfig, allocation_of
from sluice.config.footprint import GIB, Footprint
from sluice.config.tables import agents_of, environments_of
from sluice.plan.machines import GB, Machines
from sluice.plan.placement import DoesNotFitError, Sizes, Spot, on_cores, on_devices
from sluice.supervise.restart_policy import MOST_RESTARTS, START_S

RANKS_MARGIN_S = 1.0
"""Seconds that a trainer's ranks get in addition to the drain. Less than the engine's margin, so that the launcher ends last."""

MOST_PROCESSES = 1024
"""Most computing processes on one machine. A larger number is a mistake in the settings."""

OPEN_PORTS = {"grpc": 7107, "http": 7117}
"""Ports of services whose settings say 0 (any free port). They are fixed here because an engine must know where to check health."""

STRIDE = 20
"""Distance between the ports of two instances of one part on one node."""

_LAST_PORT = 65_535

LEAST_MEMORY_GIB = 4
"""Limit on the main memory of a part that computes nothing, so that a fault in it cannot take the memory of the others."""

MEMORY_MARGIN = 1.25
"""The limit is an estimate of main memory times this. The estimate does not include Python, libraries and fragmentation."""

EXTRA = ("gateway", "relay", "envserver")
"""Parts that flags can add to a plan. The settings do not show whether they are needed."""


class Restart(enum.StrEnum):
    """When an engine starts an instance again."""

    ALWAYS = "always"
    """Whenever it ended: it has work until the run ends."""

    ON_FAILURE = "on-failure"
    """Unless it ended with exit code 0: then its work is done, or it was drained."""


class Ready(enum.StrEnum):
    """When an instance is ready for the parts that wait for it."""

    SERVES = "serves"
    """It answers its own calls. Its peers may be started later: the first version of the weights comes after the orchestrator has begun an
    epoch, and replicas announce themselves. To wait for its peers, too, would be circular."""

    HAS_ITS_PEERS = "has its peers"
    """It also has what it needs from other services: `sluice health --ready`."""


@dataclass(frozen=True, slots=True)
class Port:
    """A port.

    Attributes:
        name: ``grpc``, ``http``, ``metrics``, or ``rendezvous``, where the nodes of a trainer find each other.
    """

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of process.

    Attributes:
        name: Unique in the plan, such as ``rollout``.
        service: The service that it runs: ``sluice SERVICE``. A relay runs ``weightsync``.
        count: Number of instances. Each can die, be restarted and be moved independently.
        nodes: Nodes that one instance spans.
        processes: Computing processes per node of an instance (1 if none computes): ranks under a launcher, or processes of an engine.
        devices: GPUs per node of an instance.
        threads: Threads that one process should compute with.
        device_gb: Estimated memory on each GPU in GB (10^9 bytes); None if it cannot be estimated, or nothing computes there.
        memory_gib: Main memory in GiB (2^30 bytes) that an instance may use on a machine, shared memory included.
        ports: Ports of an instance with its own network address. For instances that share a node see `Place.ports`.
        waits_for: Parts that must serve before this one can.
        ready: When an instance counts as started.
        restart: When an engine starts an instance again.
        start_s: Seconds until an instance must serve.
        drain_s: Most seconds that an instance takes to drain after SIGTERM.
        keeps_state: Whether it needs a disk that outlives the process.
        ends_run: Whether the run succeeds when this part ends with exit code 0.
        scales: Whether instances may be added and removed while the run lasts.
    """

    name: str
    service: str
    count: int = 1
    nodes: int = 1
    processes: int = 1
    devices: int = 0
    threads: int = 1
    device_gb: float | None = None
    memory_gib: int = LEAST_MEMORY_GIB
    ports: tuple[Port, ...] = ()
    waits_for: tuple[str, ...] = ()
    ready: Ready = Ready.HAS_ITS_PEERS
    restart: Restart = Restart.ALWAYS
    start_s: float = START_S
    drain_s: float = 5.0
    keeps_state: bool = False
    ends_run: bool = False
    scales: bool = False

    @property
    def instances(self) -> tuple[str, ...]:
        """Names of the instances: ``trainer``; ``rollout-0``, ``rollout-1``."""
        return (self.name,) if self.count == 1 else tuple(f"{self.name}-{number}" for number in range(self.count))

    @property
    def ranked(self) -> bool:
        """Whether a launcher starts its processes, as ranks that find each other."""
        return self.service == "trainer" and self.processes * self.nodes > 1

    def port(self, name: str = "grpc") -> int:
        """Return a port of an instance that has a network address of its own.

        Raises:
            KeyError: if it has no port of that name.
        """
        return {each.name: each.number for each in self.ports}[name]

    def health(self, address: str) -> tuple[str, ...]:
        """Return a command that exits with 0 if the instance at `address` counts as started. Words of the settings may be appended."""
        flags = ("--ready",) if self.ready is Ready.HAS_ITS_PEERS else ()
        return ("sluice", "health", *flags, address)

    def command(
        self, settings: Sequence[str], *, instance: str = "", rank: str = "0", rendezvous: str = ""
    ) -> tuple[str, ...]:
        """Return the command that starts an instance, or one node of it.

        Args:
            settings: Words of the settings: ``@``, a file, and flags such as those of `Place.port_flags`.
            instance: Name of the instance, where the service should know it.
            rank: Number of the node among the nodes of the instance, or the engine's text for it, such as a variable.
            rendezvous: ``host:port`` of the first of these nodes; needed if there are several.
        """
        words = (self.service, *settings)
        if self.service == "rollout" and instance:
            words = (*words, "--replica", instance)
        if not self.ranked:
            return ("sluice", *words)
        launcher = [
            "sluice",
            "ranks",
            "--processes",
            str(self.processes),
            "--grace",
            f"{self.drain_s + RANKS_MARGIN_S:g}",
        ]
        if self.nodes > 1:
            launcher += ["--nodes", str(self.nodes), "--node-rank", rank, "--rendezvous", rendezvous]
            launcher += ["--join", f"{self.start_s:g}"]
        return (*launcher, *words)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instance runs, or one node of it.

    Attributes:
        part: Name of the part.
        instance: Name of the instance.
        node: Number of the machine.
        rank: Number of the node among the nodes of the instance.
        devices: Numbers of its GPUs on that machine.
        ports: Its ports on that machine. No other instance there has the same.
    """

    part: str
    instance: str
    node: int
    rank: int = 0
    devices: tuple[int, ...] = ()
    ports: tuple[Port, ...] = ()

    def port(self, name: str = "grpc") -> int:
        """Return a port.

        Raises:
            KeyError: if it has no port of that name.
        """
        return {each.name: each.number for each in self.ports}[name]

    def port_flags(self) -> tuple[str, ...]:
        """Return the flags that make the service listen on these ports."""
        flags = {"grpc": "--server.port", "http": "--server.http-port", "metrics": "--server.metrics-port"}
        return tuple(word for each in self.ports if each.name in flags for word in (flags[each.name], str(each.number)))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run starts.

    Attributes:
        run: Name of the run.
        machines: The machines that it was made for.
        parts: The parts, each after all parts that it waits for.
        places: One place per instance, or per node if an instance spans several; in the order of the parts.
        shares_devices: Whether several instances use the same GPUs.
        most_restarts: Restarts of one instance within ten minutes.
    """

    run: str
    machines: Machines
    parts: tuple[Part, ...]
    places: tuple[Place, ...]
    shares_devices: bool = False
    most_restarts: int = MOST_RESTARTS
    _parts: Mapping[str, Part] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_parts", {each.name: each for each in self.parts})

    @property
    def drain_s(self) -> float:
        """Most seconds that the whole run takes to drain. The gateway's own limit is left out, since it ends soon after the orchestrator."""
        return max(part.drain_s for part in self.parts if part.name != "gateway")

    @property
    def unused_devices(self) -> int:
        """GPUs of the machines that no part uses; 0 for a run that computes on CPUs."""
        used = len({(each.node, device) for each in self.places for device in each.devices})
        return sum(self.machines.devices) - used if used else 0

    @property
    def idle(self) -> str:
        """A line about GPUs that no part uses, with the remedy; empty if there are none."""
        if not self.unused_devices:
            return ""
        return (
            f"{self.unused_devices} of {sum(self.machines.devices)} GPUs stay idle: raise the numbers of replicas or ranks (--replicas, trainer.parallel, allocation_mode),"
            " or leave them all out, which divides the GPUs between both"
        )

    def has(self, part: str) -> bool:
        """Return whether there is a part of this name."""
        return part in self._parts

    def part(self, name: str) -> Part:
        """Return a part.

        Raises:
            KeyError: if there is none of this name.
        """
        return self._parts[name]

    def place(self, instance: str, rank: int = 0) -> Place:
        """Return the place of an instance, or of one node of it.

        Raises:
            KeyError: if there is no such instance.
        """
        return {(each.instance, each.rank): each for each in self.places}[instance, rank]

    def places_of(self, part: str) -> list[Place]:
        """Return the places of a part."""
        return [each for each in self.places if each.part == part]

    def on_node(self, node: int) -> list[Place]:
        """Return the places on a machine."""
        return [each for each in self.places if each.node == node]

    def addresses(self, part: str, hosts: Sequence[str], port: str = "grpc") -> list[str]:
        """Return ``host:port`` of each instance of a part. If an instance spans several nodes, its first node counts.

        Args:
            part: Name of the part.
            hosts: Name or address of each machine.
            port: Name of the port.
        """
        return [f"{hosts[each.node]}:{each.port(port)}" for each in self.places_of(part) if not each.rank]

    def peers(self, hosts: Sequence[str]) -> PeersConfig:
        """Return the addresses of the services as settings. `hosts` has the name or address of each machine."""
        single = {
            name: self.addresses(name, hosts)[0]
            for name in ("weightsync", "trainer", "orchestrator", "gateway")
            if self.has(name)
        }
        return PeersConfig(**single, rollout=self.addresses("rollout", hosts))

    def with_ports(self, ports: Mapping[tuple[str, str], int]) -> Plan:
        """Return the plan with its ports replaced; the keys are names of instance and port."""
        places = tuple(
            replace(each, ports=tuple(replace(port, number=ports[each.instance, port.name]) for port in each.ports))
            for each in self.places
        )
        return replace(self, places=places)


_ALL_PARTS = (
    Part("weightsync", "weightsync", keeps_state=True),
    Part("envserver", "envserver"),
    Part("trainer", "trainer", waits_for=("weightsync",), ready=Ready.SERVES, keeps_state=True, memory_gib=16),
    Part("relay", "weightsync", waits_for=("weightsync",)),
    Part(
        "rollout",
        "rollout",
        waits_for=("weightsync",),
        ready=Ready.SERVES,
        restart=Restart.ON_FAILURE,
        scales=True,
        memory_gib=16,
    ),
    Part(
        "orchestrator",
        "orchestrator",
        waits_for=("envserver", "trainer", "rollout"),
        ready=Ready.SERVES,
        restart=Restart.ON_FAILURE,
        keeps_state=True,
        ends_run=True,
        memory_gib=8,
    ),
    Part("tuner", "tuner", waits_for=("weightsync", "rollout"), ready=Ready.SERVES, keeps_state=True, memory_gib=16),
    Part("gateway", "gateway", waits_for=("orchestrator",), scales=True),
    Part("agents", "agents", waits_for=("gateway",), restart=Restart.ON_FAILURE, scales=True),
)
"""All parts with the values that are the same in every plan, in start order."""


def relay_flags(upstream: str, advertise: str, directory: str) -> tuple[str, ...]:
    """Return the flags that make a weight service a relay.

    Args:
        upstream: Address of the service from which it takes versions.
        advertise: Its own address, for the replicas on its machine.
        directory: Where it keeps versions; not the directory of the weight service.
    """
    return (f"--upstream={upstream}", f"--advertise={advertise}", f"--directory={directory}")


COMPUTES = ("rollout", "trainer", "tuner")
"""Parts that keep cores and devices busy. The others wait for sockets, and share the first machine. A plan has either a trainer or a
tuner."""


class Purpose(enum.StrEnum):
    """The purpose of the services of a plan."""

    RUN = "run"
    """A run: the orchestrator decides what is sampled and trained."""

    TRAINING_API = "training-api"
    """Training loops of callers: the callers decide, and `sluice tuner` computes."""


def make_plan(
    run: RunConfig,
    machines: Machines,
    *,
    purpose: Purpose = Purpose.RUN,
    replicas: int | None = None,
    extra: Mapping[str, int] | None = None,
    threads: int | None = None,
    start_s: float = START_S,
    most_restarts: int = MOST_RESTARTS,
) -> Plan:
    """Decide what a run starts, and where.

    Rollout replicas fill the machines from the first one, without spanning two; the trainer, or the tuner, takes the last ones.
    Everything else runs on the first machine.

    Args:
        run: The settings.
        machines: Where it runs.
        purpose: The purpose of the services.
        replicas: Number of rollout replicas. None: the number in the settings.
        extra: Numbers of instances of parts of `EXTRA` to add.
        threads: Threads of each computing process. None: the processes of a machine divide its cores.
        start_s: Seconds until a part must serve.
        most_restarts: Restarts of one instance within ten minutes.

    Raises:
        ConfigError: if the run does not fit on the machines, the settings contradict each other, or the model cannot be trained with
            them; with the numbers, and what to change.
    """
    trains = "trainer" if purpose is Purpose.RUN else "tuner"
    counts = {"weightsync": 1, trains: 1, "rollout": replicas_of(replicas, run)}
    if purpose is Purpose.RUN:
        counts |= {"orchestrator": 1, "gateway": int(has_external_agents(run)), "agents": agent_workers(run)}
    for name, number in (extra or {}).items():
        if name not in EXTRA:
            raise ConfigError(f"{name!r} cannot be added to a plan: what can be is {', '.join(EXTRA)}")
        counts[name] = number
    spots, shares_devices = _spots(run, machines, counts["rollout"], trains)
    processes = {
        "rollout": run.section("rollout").processes(),
        trains: run.section(trains).processes() // len(spots[trains]),
    }
    loads = _loads(spots, processes, machines.nodes)
    shares = [cores // load for cores, load in zip(machines.cores, loads, strict=True) if load]
    threads = threads or max(1, min(shares))
    present = [each for each in _ALL_PARTS if counts.get(each.name)]
    names = {each.name for each in present}
    parts: list[Part] = []
    held: dict[str, Footprint] = {}
    for each in present:
        # At its start vLLM takes a share of a GPU's memory, and fails if less is free. So the trainer must have loaded its model before.
        first = each.name == "rollout" and trains == "trainer" and shares_devices and bool(spots["rollout"][0].devices)
        waits_for = (*each.waits_for, *(["trainer"] if first else []))
        part = replace(
            each,
            count=counts[each.name],
            ports=_ports(run, each.service),
            waits_for=tuple(name for name in waits_for if name in names),
            start_s=start_s,
            drain_s=_server(run, each.service).drain_s,
        )
        if each.name in COMPUTES:
            part = replace(
                part, processes=processes[each.name], devices=len(spots[each.name][0].devices), threads=threads
            )
            run.section(each.service).check_trainable(run)
            footprint = run.section(each.service).footprint(run, cuda=bool(part.devices))
            if footprint is not None:
                held[part.name] = footprint
                part = _with_memory(part, footprint)
        if each.name == "trainer" and len(spots[trains]) > 1:
            rendezvous = Port("rendezvous", _table(run, "trainer").parallel.rendezvous_port)
            part = replace(part, nodes=len(spots[trains]), ports=(*part.ports, rendezvous))
        parts.append(part)
    _check_memory(held, parts, spots, machines)
    places = _with_own_ports(_places(parts, spots))
    return Plan(run.run, machines, tuple(parts), tuple(places), shares_devices, most_restarts)


def replicas_of(flag: int | None, run: RunConfig) -> int:
    """Return the number of rollout replicas of a run: the value of `--replicas`, or the number in the settings if that is None.

    Raises:
        ConfigError: if it is 0, or the settings contradict each other.
    """
    allocation = allocation_of(run)
    named = len(run.peers.rollout)
    if allocation is not None and allocation.rollout is not None:
        replicas = allocation.rollout.dimensions.data
        listed = named if "rollout" in run.peers.model_fields_set else replicas
        for setting, number in (("--replicas", flag or replicas), ("the length of peers.rollout", listed)):
            if number != replicas:
                raise ConfigError(
                    f"the allocation {allocation} has {replicas} replicas, but {setting} is {number}: remove one of them"
                )
        return replicas
    if not (flag or named):
        raise ConfigError("peers.rollout is empty: a run needs at least one rollout replica (--replicas 1)")
    return flag or named


def has_external_agents(run: RunConfig) -> bool:
    """Return whether agents outside of the run play its episodes. They need a gateway."""
    return any(each.workflow == "external" for each in environments_of(run))


def agent_workers(run: RunConfig) -> int:
    """Return how many processes play episodes with the class that `agents.agent` names; 0 without one."""
    agents = agents_of(run)
    return agents.workers if agents is not None and agents.agent else 0


def _spots(run: RunConfig, machines: Machines, replicas: int, trains: str) -> tuple[dict[str, list[Spot]], bool]:
    """Return the spots of the replicas and of the part that trains, and whether they share devices.

    Raises:
        ConfigError: if they do not fit.
    """
    trainer, rollout = run.section(trains).processes(), run.section("rollout").processes()
    allocation = allocation_of(run)
    computes = ("rollout", trains)
    there = any(machines.devices)
    on = {name: there and run.section(name).uses_devices() for name in computes}
    if not there:
        for name in computes:
            if getattr(_table(run, name), "device", None) == "cuda":
                raise ConfigError(f"{name}.device is cuda, but there is no CUDA device: set it to auto or cpu")
    group = int(_table(run, "trainer").parallel.tp) if trains == "trainer" else 1
    everything = Sizes(replicas, rollout, trainer, group)
    gpu = replace(everything, replicas=replicas if on["rollout"] else 0, ranks=trainer if on[trains] else 0)
    cpu = replace(everything, replicas=replicas - gpu.replicas, ranks=trainer - gpu.ranks)
    shared = allocation is not None and allocation.shared
    try:
        placed = on_devices(gpu, machines.devices, shared=shared)
    except DoesNotFitError as error:
        if allocation is None and machines.nodes == 1 and gpu.ranks <= machines.devices[0]:
            # Without an allocation all services share the devices of the machine, and each takes what it needs.
            everywhere = Spot(0, tuple(range(machines.devices[0])))
            placed, shared = ([everywhere] * gpu.replicas, [everywhere] if gpu.ranks else []), True
        else:
            source = "trainer.parallel" if allocation is None else f"the allocation {allocation}"
            raise ConfigError(f"{source} does not fit: {error}") from error
    beside = on_cores(cpu, machines.cores)
    return {name: [*a, *b] for name, a, b in zip(computes, placed, beside, strict=True)}, shared


def _check_memory(
    held: Mapping[str, Footprint], parts: Sequence[Part], spots: Mapping[str, Sequence[Spot]], machines: Machines
) -> None:
    """Refuse machines whose devices or main memory are too small for the parts that compute there.

    Raises:
        ConfigError: with the numbers and the remedy.
    """
    needed: Counter[int] = Counter()
    for part in parts:
        if part.name not in held:
            continue
        for spot in spots[part.name]:
            machine = machines.each[spot.node]
            needed[spot.node] += _main_memory(part, held[part.name])
            try:
                if part.devices:
                    held[part.name].check(None if machine.device_gb is None else machine.device_gb * GB)
            except ConfigError as error:
                raise ConfigError(f"{part.name} does not fit on a machine of {machine}: {error}") from error
    for node, size in sorted(needed.items()):
        memory_gb = machines.each[node].memory_gb
        if memory_gb is not None and memory_gb * GB < size * GIB:
            there = ", ".join(
                part.name for part in parts if part.name in held and any(spot.node == node for spot in spots[part.name])
            )
            raise ConfigError(
                f"machine {node} ({machines.each[node]}) is too small: {there} are estimated to need {size} GiB of main memory together:"
                " use machines with more, or fewer replicas on each"
            )


def _main_memory(part: Part, held: Footprint) -> int:
    """Return the estimated main memory of an instance on one machine in GiB, with a margin."""
    on_cpu = 0 if part.devices else held.device * part.processes
    return math.ceil((held.host + held.host_of_process * part.processes + on_cpu) * MEMORY_MARGIN / GIB)


def _with_memory(part: Part, held: Footprint) -> Part:
    """Return the part with its estimated memory."""
    bound = _main_memory(part, held) + LEAST_MEMORY_GIB
    return replace(
        part, device_gb=round(held.device / GB, 1) if part.devices else None, memory_gib=max(part.memory_gib, bound)
    )


def _loads(spots: Mapping[str, Sequence[Spot]], processes: Mapping[str, int], nodes: int) -> list[int]:
    """Return the number of computing processes on each machine.

    Raises:
        ConfigError: if there are more than `MOST_PROCESSES` on one.
    """
    loads = [0] * nodes
    for name, held in spots.items():
        for spot in held:
            loads[spot.node] += processes[name]
    if max(loads) > MOST_PROCESSES:
        raise ConfigError(
            f"{max(loads)} processes of {len(spots['rollout'])} replicas and of what trains would compute on one machine, more than the {MOST_PROCESSES} that one machine may run: use fewer, or more machines"
        )
    return loads


def _places(parts: Sequence[Part], spots: Mapping[str, Sequence[Spot]]) -> Iterator[Place]:
    """Yield the places of all parts, without ports."""
    with_replicas = sorted({spot.node for spot in spots["rollout"]})
    away = [node for node in with_replicas if node] or [0]
    for part in parts:
        for number, instance in enumerate(part.instances):
            if part.name == "rollout":
                held = [spots["rollout"][number]]
            elif part.name in spots:
                held = list(spots[part.name])
            else:  # a relay is only of use on a machine without the weight service
                held = [Spot(away[number % len(away)] if part.name == "relay" else 0)]
            for rank, spot in enumerate(held):
                yield Place(part.name, instance, spot.node, rank, spot.devices, part.ports if rank == 0 else ())


def _with_own_ports(places: Iterator[Place]) -> Iterator[Place]:
    """Change ports that another place on the same machine already has.

    Raises:
        ConfigError: if there are no further ports.
    """
    taken: set[tuple[int, int]] = set()
    for place in places:
        ports = []
        for port in place.ports:
            number = port.number
            while (place.node, number) in taken:
                number += STRIDE
            if number > _LAST_PORT:
                raise ConfigError(
                    f"machine {place.node} has no port left for {place.instance} beyond {port.number}: set a lower"
                    f" {place.part}.server.port, or use more machines"
                )
            taken.add((place.node, number))
            ports.append(Port(port.name, number))
        yield replace(place, ports=tuple(ports))


def _ports(run: RunConfig, service: str) -> tuple[Port, ...]:
    server = _server(run, service)
    named = {"grpc": server.port or OPEN_PORTS["grpc"]}
    if server.http_port is not None or service == "gateway":
        named["http"] = server.http_port or OPEN_PORTS["http"]
    if server.metrics_port:
        named["metrics"] = server.metrics_port
    return tuple(Port(name, number) for name, number in named.items())


def _table(run: RunConfig, service: str) -> Any:  # noqa: ANN401 - a table of a package that this one does not import
    return run.section(service)


def _server(run: RunConfig, service: str) -> ServerConfig:
    server: ServerConfig = _table(run, service).server
    return server
