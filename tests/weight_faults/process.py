"""A program in a process of its own that can be killed at a chosen point and started again, in a fraction of a second."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from weight_faults import programs
from weight_faults.points import Point

__all__ = ["ATTEMPTS", "DEADLINE_S", "SILENCE_S", "GoneError", "Program"]

DEADLINE_S = 300.0
"""Longest wait for anything; a cell that needs it has failed."""

SILENCE_S = 60.0
"""Seconds without a sign of life that no program needs, however busy the machine is."""

ATTEMPTS = 10
"""Pulls of the same bytes after which an engine gives up: enough for a service that is started again."""

_CONTEXT = multiprocessing.get_context("forkserver")
# Modules of the product: the server that forks does not know the directory of the tests.
_CONTEXT.set_forkserver_preload(["torch", "weightsync.app", "weightsync.publisher", "weightsync.receiver"])


class GoneError(Exception):
    """The process ended before it answered."""


class Program:
    """A program of `weight_faults.programs`.

    Args:
        role: Which one.
        name: What it is called here.
        settings: What it takes.
        log: File that takes its output.

    Attributes:
        reached: Set when an armed point that halts was reached.
        dead: Set when the process is gone.
    """

    def __init__(self, role: str, name: str, settings: Mapping[str, Any], log: Path) -> None:
        self.role, self.name, self.settings, self.log = role, name, dict(settings), log
        self.reached, self.dead = threading.Event(), threading.Event()
        self._ready = threading.Event()
        self._ids = itertools.count()
        self._open: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process, for the first time or again."""
        self.reached, self.dead, self._ready = threading.Event(), threading.Event(), threading.Event()
        ours, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=programs.main, args=(theirs, self.role, self.settings, str(self.log)), daemon=True
        )
        self._process.start()
        theirs.close()
        self._orders = ours
        self._reader = threading.Thread(
            target=self._read, args=(ours, self.reached, self.dead, self._ready), daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid or 0

    def await_ready(self) -> None:
        """Return when the program takes orders.

        Raises:
            GoneError: if it does not in time.
        """
        if not self._ready.wait(DEADLINE_S):
            raise GoneError(f"{self.name} did not start; see {self.log}")

    def ask(self, do: str, within_s: float = DEADLINE_S, **fields: object) -> dict[str, Any]:
        """Give an order and wait for the answer.

        Raises:
            GoneError: if the process ends before.
            TimeoutError: if it does not answer in time.
        """
        number, answer = next(self._ids), Future[dict[str, Any]]()
        with self._lock:
            self._open[number] = answer
        try:
            self._orders.send_bytes(json.dumps({"do": do, "id": number, **fields}).encode())
        except OSError as error:
            raise GoneError(f"{self.name} is gone") from error
        if self.dead.is_set() and not answer.done():
            raise GoneError(f"{self.name} is gone")
        return answer.result(within_s)

    def arm(self, point: Point, *, halt: bool) -> None:
        """Have the process kill itself at a point, or halt there and set `reached`."""
        self.ask("arm", point=asdict(point), halt=halt)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        if self.pid:  # 0 would mean this process and its group
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as an operating system out of memory does, and wait until it is gone."""
        self._process.kill()
        self.await_death()

    def await_death(self) -> None:
        """Return when the process is gone.

        Raises:
            TimeoutError: if it lives on.
        """
        self._process.join(DEADLINE_S)
        if self._process.exitcode is None:
            raise TimeoutError(f"{self.name} lives on: the point was not reached")
        self._reader.join(DEADLINE_S)
        self._orders.close()

    @property
    def killed(self) -> bool:
        """Whether it ended by SIGKILL."""
        return self._process.exitcode == -signal.SIGKILL

    def _read(
        self, orders: Connection, reached: threading.Event, dead: threading.Event, ready: threading.Event
    ) -> None:
        try:
            while True:
                message = json.loads(orders.recv_bytes())
                match message.get("event"):
                    case "ready":
                        ready.set()
                    case "reached":
                        reached.set()
                    case _:
                        with self._lock:
                            answer = self._open.pop(message.pop("answer"))
                        answer.set_result(message)
        except (EOFError, OSError):
            dead.set()
            with self._lock:
                lost, self._open = list(self._open.values()), {}
            for answer in lost:
                answer.set_exception(GoneError(f"{self.name} is gone"))
