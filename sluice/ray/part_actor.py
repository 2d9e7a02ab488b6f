"""The actor that holds one process of a run, with the supervisor that `sluice rl` has: same restarts, same drain, same logs.

If the actor is killed, a watchdog ends its process. Only small messages go through Ray: ports, one file of settings, states, and warnings
that the process logged. Each answer is so small that Ray sends it within the reply, and never puts it into its object store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import ray

from sluice.config import load_run
from sluice.plan.local import LEFT, child_environment
from sluice.plan.plan import Part
from sluice.rpc.channel import wait_until_serving
from sluice.rpc.principals import replace_private
from sluice.rpc.server import free_ports, is_free
from sluice.supervise.log_records import LogLine
from sluice.supervise.supervisor import ChildSpec, ChildState, LogLimit, Outcome, Supervisor

ANY_NODE = "localhost"
"""Name for which each certificate of the driver is valid, and by which servers are checked, since their nodes are not known in advance."""

MOST_EVENTS = 40
"""Most events in one answer. With `_LINE_CHARACTERS` each, an answer stays below 100 KiB; Ray puts larger ones into its object store."""

_KEPT_EVENTS = 1000
_LINE_CHARACTERS = 1000

POLL_S = 20.0
"""Seconds after which a call for events is answered with none, so that the caller knows that the actor lives."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an actor is.

    Attributes:
        incarnation: Differs for each process of the actor.
        host: Address of the node.
        ports: Ports that are free on it.
        running: Whether it holds a process already: the caller lost the connection, not the actor.
        problem: Why nothing can be started here; empty if it can.
    """

    incarnation: str
    host: str
    ports: Mapping[str, int]
    running: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """What an actor starts.

    Attributes:
        name: Label of the process, and name of its log.
        part: The part.
        instance: Name of the instance.
        rank: Number of the node among the nodes of the instance.
        rendezvous: ``host:port`` of the first of these nodes.
        flags: Settings that differ between processes: addresses.
        settings: Content of the file with all other settings, with secrets.
        dispatcher_token: Token that the driver made; empty if the settings name one, or none is needed.
        certificates: Files of the folder `security.certs_dir` that the driver made, by name; none if the settings name certificates.
        logs: Directory of the log.
        most_restarts: Restarts of the process within ten minutes.
    """

    name: str
    part: Part
    instance: str
    rank: int
    rendezvous: str
    flags: tuple[str, ...]
    settings: str
    dispatcher_token: str
    certificates: Mapping[str, bytes]
    logs: str
    most_restarts: int


Event = LogLine | tuple[ChildState, str] | Outcome
"""A line that the process logged, a new state of it with the reason, or its end."""


class PartActor:
    """Holds one process. All calls are answered side by side, in one event loop."""

    def __init__(self, name: str) -> None:
        self._name, self._incarnation = name, uuid.uuid4().hex
        self._events: deque[tuple[int, Event]] = deque(maxlen=_KEPT_EVENTS)
        self._number = 0
        self._more, self._stop = asyncio.Event(), asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return self._name

    async def reserve(
        self, ports: Mapping[str, int], *, fixed: bool, directory: str, probe: tuple[str, str], release: str
    ) -> Address:
        """Return where this actor is, with a free port for each name.

        Args:
            ports: Number that a port should have; 0 for any.
            fixed: Whether a port must have its number. Otherwise it gets another number if that one is taken.
            directory: Working directory of the driver.
            probe: A file that must exist here, and its content, to check that this node sees the driver's run directory. Two empty texts:
                no check.
            release: Version of Sluice at the driver.
        """
        host = ray.util.get_node_ip_address()
        if self._running is not None:
            return Address(self._incarnation, host, {}, running=True)
        problem = _problem(host, directory, probe, release)
        taken = [name for name, number in ports.items() if not number or not is_free(number, host)]
        if fixed and taken:
            numbers = ", ".join(str(ports[name]) for name in taken)
            problem = problem or f"port {numbers} of {host} is taken: stop what uses it, or set another one"
        chosen = dict(ports) | dict(zip(taken, free_ports(len(taken), host), strict=True))
        return Address(self._incarnation, host, chosen, problem=problem)

    async def start(self, order: Order, host: str, ports: Mapping[str, int]) -> None:
        """Start the process. Its states and its end are events. Events of an earlier process are forgotten."""
        if self._running is not None:
            raise RuntimeError(f"{self._name} holds a process already; this is a defect")
        self._events.clear()
        self._stop.clear()
        self._running = asyncio.create_task(self._hold(order, host, ports), name=order.name)

    async def events(self, after: int) -> list[tuple[int, Event]]:
        """Return the next events, at most `MOST_EVENTS`; none if there are none for `POLL_S` seconds.

        Args:
            after: Number of the last event that the caller has; it and earlier ones are forgotten.
        """
        while self._events and self._events[0][0] <= after:
            self._events.popleft()
        if not self._events:
            self._more.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._more.wait()
        return list(self._events)[:MOST_EVENTS]

    async def stop(self) -> None:
        """Let the process drain, then end it. Without effect if there is none."""
        self._stop.set()
        if self._running is not None:
            await asyncio.wait({self._running})

    def on_line(self, child: str, line: LogLine) -> None:
        """Keep a line for the driver; the log has the whole of it."""
        del child
        self._tell(replace(line, text=line.text[:_LINE_CHARACTERS], kind=line.kind[:_LINE_CHARACTERS]))

    def on_state(self, child: str, state: ChildState, detail: str) -> None:
        """Keep a state for the driver."""
        del child
        self._tell((state, detail))

    def _tell(self, event: Event) -> None:
        self._number += 1
        self._events.append((self._number, event))
        self._more.set()

    async def _hold(self, order: Order, host: str, ports: Mapping[str, int]) -> None:
        """Run the process to its end, with restarts, and tell the outcome."""
        try:
            with tempfile.TemporaryDirectory(prefix="sluice-") as name:
                supervisor = Supervisor(
                    [_spec(order, host, ports, Path(name))],
                    self,
                    max_restarts=order.most_restarts,
                    # Two processes must never write the same files. So a process that keeps state is killed together with its actor.
                    orphan_grace_s=0.0 if order.part.keeps_state else None,
                )
                outcome = await supervisor.run(self._stop)
        finally:
            self._running = None
        self._tell(replace(outcome, tail=tuple(line[:_LINE_CHARACTERS] for line in outcome.tail)))


def _problem(host: str, directory: str, probe: tuple[str, str], release: str) -> str:
    """Enter the driver's working directory. Return why nothing can be started on this node; empty if it can."""
    if version("sluice") != release:
        return (
            f"node {host} has sluice {version('sluice')}, the driver has {release}: install the same one on all nodes"
        )
    try:
        os.chdir(directory)
    except OSError as error:
        return (
            f"node {host} cannot enter {directory}, the driver's working directory ({error.strerror}): start the run in a directory that"
            " all nodes have, or submit it with `ray job submit --working-dir .`"
        )
    path, content = probe
    try:
        seen = Path(path).read_text(encoding="utf-8") if path else ""
    except OSError:
        seen = ""
    if seen != content:
        return (
            f"node {host} does not see the driver's {Path(path).parent}, and what runs there keeps state in it: set --output-dir to a"
            " directory that the nodes share"
        )
    return ""


async def _at_once() -> None:
    """Return at once: only the first node of a trainer serves requests."""


def _spec(order: Order, host: str, ports: Mapping[str, int], private: Path) -> ChildSpec:
    """Return the process to start, with its secrets in files of the directory `private`."""
    part, settings = order.part, private / "settings.toml"
    replace_private(settings, order.settings.encode())
    words = ["@", str(settings), "--server.host", host, *order.flags]
    flags = {"grpc": "--server.port", "http": "--server.http-port"}
    words += [word for name, number in ports.items() if name in flags for word in (flags[name], str(number))]
    secured: list[str] = []
    if order.certificates:
        folder = private / "certs"
        folder.mkdir(mode=0o700)
        for name, content in order.certificates.items():
            replace_private(folder / name, content)
        secured = ["--security.certs-dir", str(folder), "--security.tls-address-name", ANY_NODE]
    words += secured
    if order.dispatcher_token:
        token = private / "dispatcher.token"
        replace_private(token, order.dispatcher_token.encode())
        words += ["--security.dispatcher-token-file", str(token)]
    command = part.command(words, instance=order.instance, rank=str(order.rank), rendezvous=order.rendezvous)
    run = load_run(["@", str(settings), *secured], part.service)
    # Ray sets this variable for its workers; the value from the plan is better.
    given = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return ChildSpec(
        name=order.name,
        argv=(sys.executable, "-m", "sluice.cli.main", *command[1:]),
        log_path=Path(order.logs) / f"{order.name}.log",
        wait_ready=(lambda: wait_until_serving(f"{host}:{ports['grpc']}", run.security))
        if "grpc" in ports
        else _at_once,
        environment=child_environment(part, given),
        ends_run=part.ends_run,
        may_leave=LEFT.get(part.service, ""),
        start_s=part.start_s,
        drain_s=part.drain_s,
        log_limit=LogLimit(run.log_mb << 20, run.log_files),
    )
