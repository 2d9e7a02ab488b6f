"""Faults that disturb the processes of a run from outside, and their order for a seed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from sluice.cli import fork_server

SERVICES = ("trainer", "orchestrator", "weightsync")
"""Services that a run has once."""

STOP_S = 8.0
"""Seconds that a stopped replica stands still: longer than it takes to be evicted."""

FULL_S = 3.0
"""Seconds that the disk is full."""

_MOST_APART_S = 0.5
_MOST_WAIT_S = 0.6
_PIDFD_GETFD = 438
"""Number of the system call, the same on every architecture."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: "kill", "stop", "cut" or "disk full".
        victims: Children of the run by name; empty for the disk.
        wait_s: Seconds between the recovery from the previous fault and this one.
        apart_s: Seconds between the first victim and the second.
    """

    kind: str
    victims: tuple[str, ...]
    wait_s: float
    apart_s: float

    def __str__(self) -> str:
        """Return kind and victims."""
        return " ".join([self.kind, " and ".join(self.victims)]).strip()


def draw_faults(seed: int, replicas: Sequence[str], *, kills: int, pairs: int, disk: bool) -> list[Fault]:
    """Return the faults of a seed in their order.

    Every child is killed `kills` times alone; `pairs` times two are killed together. One replica is stopped, each service and one
    replica lose a connection, and, with `disk`, the disk is full once.
    """
    numbers = random.Random(seed)  # noqa: S311 - a plan, not a secret
    children = [*SERVICES, *replicas]
    drawn: list[tuple[str, tuple[str, ...]]] = [("kill", (each,)) for each in children for _ in range(kills)]
    drawn += [("kill", tuple(numbers.sample(children, 2))) for _ in range(pairs)]
    drawn += [("stop", (numbers.choice(replicas),))]
    drawn += [("cut", (each,)) for each in (*SERVICES, numbers.choice(replicas))]
    drawn += [("disk full", ())] if disk else []
    numbers.shuffle(drawn)
    return [
        Fault(kind, victims, numbers.uniform(0, _MOST_WAIT_S), numbers.uniform(0, _MOST_APART_S))
        for kind, victims in drawn
    ]


def children_of(supervisor: psutil.Process) -> dict[str, psutil.Process]:
    """Return the services that a supervisor runs now, by the name that it gives them.

    A fork server has the same arguments as the service that it starts, but is not a service.
    """
    found = {}
    for child in supervisor.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = child.cmdline()
            below = [child] if fork_server.__name__ not in words else child.children()
            name = next((word for word in words if word in {*SERVICES, "rollout"}), "")
            if "--replica" in words:
                name = words[words.index("--replica") + 1]
            if name and below:
                found[name] = below[0]
    return found


async def kill(supervisor: psutil.Process, fault: Fault) -> None:
    """Kill the victims. Do not wait for a victim that is not running now."""
    for number, victim in enumerate(fault.victims):
        if number:
            await asyncio.sleep(fault.apart_s)
        process = children_of(supervisor).get(victim)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


async def stop(supervisor: psutil.Process, fault: Fault) -> None:
    """Stop the processes of the victim for a while."""
    process = children_of(supervisor).get(fault.victims[0])
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOP_S)
        finally:
            os.killpg(process.pid, signal.SIGCONT)


def cut(supervisor: psutil.Process, fault: Fault) -> None:
    """Shut down every TCP connection that the victim has now, in both directions."""
    process = children_of(supervisor).get(fault.victims[0])
    for connection in _connections(process.pid) if process else ():
        with connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _connections(pid: int) -> list[socket.socket]:
    """Return copies of a process's connected TCP sockets."""
    found = []
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if not entry.readlink().name.startswith("socket:"):
                        continue
                    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, int(entry.name), 0)
                    if copy < 0:
                        continue
                    connection = socket.socket(fileno=copy)
                    if connection.type == socket.SOCK_STREAM and connection.family in {socket.AF_INET, socket.AF_INET6}:
                        with contextlib.suppress(OSError):
                            connection.getpeername()  # fails for a socket that listens
                            found.append(connection)
                            continue
                    connection.close()
        finally:
            os.close(handle)
    return found


async def fill_disk(directory: Path) -> None:
    """Leave no byte of a file system free for a while."""
    ballast = directory / "ballast"
    try:
        await asyncio.to_thread(_fill, ballast)
        await asyncio.sleep(FULL_S)
    finally:
        ballast.unlink(missing_ok=True)


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass
