"""A trainer, a weight service, possibly a relay, and an engine, each in a process, and what must be true of them together."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from held_ports import held_ports

from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import BASE, Version
from weight_faults.observer import Observer
from weight_faults.process import ATTEMPTS, DEADLINE_S, SILENCE_S, Program
from weight_faults.programs import RUN
from weight_faults.versions import DENSE_BYTES
from weight_faults.wire import Wire

__all__ = ["World", "eventually", "expect", "rubbish"]

_KEEP = 100
"""More than the versions of any cell: retention then removes nothing that a check still asks for."""

_ATTEMPT_S = DEADLINE_S / 5
"""Seconds for one attempt at a push: a bit that turns over in a frame's own header lets it wait to its deadline."""


class World:
    """Builds the processes, starts versions on their way, and checks what came of it.

    Args:
        directory: Where everything lies; empty.
        relay: Whether there is a relay, which an engine of the same host prefers.
        local_files: Whether processes hand each other files of this host; otherwise all bytes go through sockets.
        wired: Programs that reach the service by a wire that can be damaged.
        silence_s: Seconds without a sign of life after which an engine opens a stream again.
        attempts: Pulls of the same bytes after which an engine gives up.

    Attributes:
        wires: The wires, by program.
        acknowledged: Versions of which the trainer heard that they are committed.
        given_up: Those of them that may be gone.
    """

    def __init__(
        self,
        directory: Path,
        *,
        relay: bool = False,
        local_files: bool = False,
        wired: Iterable[str] = (),
        silence_s: float = SILENCE_S,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.directory = directory
        self.stage_dir, self.host_dir = directory / "shm", directory / "host"
        self.host_dir.mkdir()
        self.epoch = 1
        self.acknowledged: list[Version] = []
        self.given_up: set[Version] = set()
        self._held = contextlib.ExitStack()
        ports = self._held.enter_context(held_ports(2))  # a program that is started again is found where it was
        self._ports = dict(zip(("service", "relay"), ports, strict=True))
        self.service = self._service("service", {})
        self.relay = self._service("relay", {"upstream": self.address("service")}) if relay else None
        self.wires = {name: Wire(self._ports["service"]) for name in wired}
        staging = {"replica": "engine", "stage_dir": str(self.stage_dir), "silence_s": silence_s, "attempts": attempts}
        self.trainer = self._peer("trainer", {"local_files": local_files, "host_dir": str(self.host_dir)})
        self.engine = self._peer("engine", {"local_files": local_files, **staging})
        self.programs = [each for each in (self.service, self.relay, self.trainer, self.engine) if each is not None]
        self.observer = Observer(self.engine, [self.store(each) for each in ("service", "relay")[: 1 + relay]])
        self._threads = ThreadPoolExecutor(4)
        self._stopping = threading.Event()

    def address(self, name: str) -> str:
        """Where the service or the relay listens."""
        return f"127.0.0.1:{self._ports[name]}"

    def store(self, name: str) -> Path:
        """Directory of the versions of the service or the relay."""
        return self.directory / name / RUN / "weights"

    def _service(self, name: str, more: dict[str, object]) -> Program:
        config: dict[str, Any] = {
            "server": {"port": self._ports[name], "drain_s": 0},
            "min_free_bytes": 0,
            "local_dir": str(self.host_dir),
            "keep": _KEEP,
            "heartbeat_s": 0.3,
            "dense_delay_s": 0,
            "linger_s": 1,
            **more,
        }
        settings = {"directory": str(self.directory / name), "config": config}
        return Program("service", name, settings, self.directory / f"{name}.log")

    def _peer(self, name: str, settings: dict[str, object]) -> Program:
        wire = self.wires.get(name)
        target = self.address("service") if wire is None else f"127.0.0.1:{wire.port}"
        return Program(name, name, {"target": target, **settings}, self.directory / f"{name}.log")

    def __enter__(self) -> Self:
        """Start everything."""
        for program in self.programs[:-1]:
            program.start()
        if self.relay is not None:  # before the engine looks for the nearest
            eventually(lambda: len(self._sources("service")) == 2, "the relay does not report itself")
        self.engine.start()
        for program in self.programs:
            program.await_ready()
        if self.relay is not None:
            eventually(lambda: self._sources("relay")[0].watchers == 1, "the engine does not choose the relay")
        self.observer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything."""
        self._stopping.set()
        self.observer.stop()
        for program in self.programs:
            if not program.dead.is_set():
                program.kill()
        for wire in self.wires.values():
            wire.close()
        self._threads.shutdown(cancel_futures=True)
        self._held.close()

    def add_engine(self, name: str) -> Program:
        """Start another engine of the same host."""
        engine = Program("engine", name, {**self.engine.settings, "replica": name}, self.directory / f"{name}.log")
        self.programs.append(engine)
        engine.start()
        engine.await_ready()
        return engine

    def program(self, name: str) -> Program:
        """A program by name."""
        return next(each for each in self.programs if each.name == name)

    def push(self, version: Version, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Have the trainer publish a version, and again while that fails, as a trainer does.

        Raises:
            GoneError: if the trainer dies.
            TimeoutError: if it cannot be published in time; the message holds the last failure.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            answer = self.try_push(version, min(_ATTEMPT_S, deadline - time.monotonic()))
            if "error" not in answer:
                return answer
            if time.monotonic() > deadline or self._stopping.wait(0.1):
                raise TimeoutError(f"version {version} was not published: {answer['error']}")

    def try_push(self, version: Version, deadline_s: float) -> dict[str, Any]:
        """Have the trainer publish a version once; the answer holds "error", "code" and "reason" where that failed."""
        answer = self.trainer.ask("push", deadline_s + DEADLINE_S, version=str(version), deadline_s=deadline_s)
        if "error" not in answer:
            self.acknowledged.append(version)
        return answer

    def push_later(self, version: Version) -> Future[dict[str, Any]]:
        """Begin to publish a version."""
        return self._threads.submit(self.push, version)

    def await_served(self, version: Version) -> None:
        """Return when the engine serves a version."""
        self.observer.await_served(version, DEADLINE_S)

    def deliver(self, version: Version) -> dict[str, Any]:
        """Publish a version and return when the engine serves it."""
        answer = self.push(version)
        self.await_served(version)
        return answer

    def restart(self, program: Program) -> None:
        """Start a program again, as a supervisor does. A trainer begins a new epoch."""
        if program is self.trainer:
            self.epoch += 1
        program.start()
        program.await_ready()

    def visible(self, name: str = "service") -> list[Version]:
        """Versions that a service lists, newest first."""
        return [Version.from_proto(each.version) for each in self._list(name).versions]

    def _sources(self, name: str) -> list[pb.WeightSource]:
        with grpc.insecure_channel(self.address(name)) as channel:
            stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
            request = pb.ListSourcesRequest(run=f"runs/{RUN}")
            return list(stub.ListSources(request, timeout=DEADLINE_S, wait_for_ready=True).sources)

    def reported(self) -> Version | None:
        """The version that the engine said it serves, as the service knows it."""
        replicas = self._list("service").replicas
        return next((Version.from_proto(each.version) for each in replicas if each.replica == "engine"), None)

    def _list(self, name: str) -> pb.ListVersionsResponse:
        with grpc.insecure_channel(self.address(name)) as channel:
            stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
            request = pb.ListVersionsRequest(run=f"runs/{RUN}")
            return stub.ListVersions(request, timeout=DEADLINE_S, wait_for_ready=True)

    def check(self, newest: Version) -> None:
        """What must hold when the dust has settled and `newest` serves.

        Raises:
            AssertionError: if something is lost, wrong or left over; the message says what.
            TimeoutError: if something does not happen in time.
        """
        self.observer.await_loaded(newest, DEADLINE_S)
        visible = self.visible()
        lost = set(self.acknowledged) - set(visible) - self.given_up
        unknown = set(self.observer.served) - set(visible) - set(self.acknowledged) - {BASE}
        expect(not self.observer.wrong, "; ".join(self.observer.wrong[:3]))
        expect(not lost, f"committed and lost: {sorted(lost)}")
        expect(not unknown, f"served and never committed: {sorted(unknown)}")
        expect(visible[0] == newest, f"the newest version is {visible[0]}, not {newest}")
        eventually(lambda: self.reported() == newest, "the engine's report did not arrive")
        for name in ("service", "relay")[: 1 if self.relay is None else 2]:
            eventually(lambda: not rubbish(self.store(name)), "rubbish stays in the store")  # noqa: B023 - awaited here
        eventually(lambda: _bytes_in(self.stage_dir) < 1.5 * DENSE_BYTES, "shared memory is not given back")
        eventually(lambda: _bytes_in(self.host_dir) < 1.5 * DENSE_BYTES, "a dead trainer's memory is not given back")
        self.engine.signal(signal.SIGTERM)
        eventually(lambda: not _bytes_in(self.stage_dir), "an engine that ended left something in shared memory")


def expect(condition: bool, otherwise: str) -> None:
    """Raise AssertionError where a condition does not hold; holds with optimised code too."""
    if not condition:
        raise AssertionError(otherwise)


def rubbish(store: Path) -> list[Path]:
    """Files of a store that no version needs."""
    return [path for part in (".incoming", ".building", ".trash") for path in _files_in(store / part)]


def _files_in(directory: Path) -> list[Path]:
    """Files below a directory that a live process may be emptying, which `Path.rglob` does not survive."""
    return [Path(parent, name) for parent, _, names in os.walk(directory) for name in names]


def _bytes_in(directory: Path) -> int:
    size = 0
    for path in _files_in(directory):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def eventually(condition: Callable[[], bool], otherwise: str) -> None:
    """Return when a condition holds; raise TimeoutError where it does not in time."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.02)
