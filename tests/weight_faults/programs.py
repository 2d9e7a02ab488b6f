"""What runs in the processes: the real service and relay, a trainer's publisher, an engine's receiver. Each obeys orders."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from prometheus_client import REGISTRY

import weightsync.app
import weightsync.publisher
import weightsync.receive.sources
import weightsync.receiver
from sluice.config import CommonConfig, SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.telemetry import configure_logging
from sluice.versions import Version
from weight_faults.engine import Engine
from weight_faults.points import Point, arm
from weight_faults.versions import tensors_of
from weightsync.config import WeightSyncConfig
from weightsync.publisher import WeightPublisher
from weightsync.receive.pull import PullLimits
from weightsync.receive.sources import SourceLimits
from weightsync.receiver import ReceiverOptions, WeightReceiver

__all__ = ["CHUNK_BYTES", "RUN", "main"]

RUN = "faults"

CHUNK_BYTES = 4096
"""Size of chunks here: small, so that a small model still travels in hundreds of them and a delta in several."""

_SOURCES = SourceLimits(look_s=3600, answer_s=60, fallback_s=1, retry_s=1, ban_s=1)
"""A source that is gone is left sooner than in service, a slow one is not, and no other is looked for without a reason."""

_WAYS = ("delta", "dense")

Message: TypeAlias = dict[str, Any]
Settings: TypeAlias = Mapping[str, Any]
Handler: TypeAlias = Callable[[Message], Awaitable[Message]]


def main(orders: Connection, role: str, settings: Settings, log: str) -> None:
    """Run one program until it is killed or its parent is gone.

    Args:
        orders: Where orders come from and answers go to: JSON, one message each.
        role: "service", "trainer" or "engine"; a relay is a service with an upstream.
        settings: What the program of that role takes.
        log: File for its output.
    """
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The parent decides about this process, not the terminal or the test's runner.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    configure_logging(role, "info")
    _shrink_chunks()
    desk = Desk(orders)
    threading.Thread(target=desk.listen, daemon=True).start()
    try:
        asyncio.run({"service": _service, "trainer": _trainer, "engine": _engine}[role](desk, settings))
    finally:
        sys.stdout.flush()


def _shrink_chunks() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("weightsync.") and hasattr(module, "MAX_CHUNK_BYTES"):
            vars(module)["MAX_CHUNK_BYTES"] = CHUNK_BYTES


class Desk:
    """Takes orders: arming a point here, everything else by the program's handler in its event loop."""

    def __init__(self, orders: Connection) -> None:
        self._orders = orders
        self._sending = threading.Lock()
        self._go_on = threading.Event()
        self._program: Future[tuple[asyncio.AbstractEventLoop, Handler]] = Future()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, handler: Handler) -> None:
        """Take orders for the running loop from now on."""
        self._program.set_result((asyncio.get_running_loop(), handler))
        self._send({"event": "ready"})

    def listen(self) -> None:
        """Read orders until the parent is gone, which ends this process too."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._take(json.loads(self._orders.recv_bytes()))
        os._exit(3)

    def _take(self, order: Message) -> None:
        match order["do"]:
            case "arm":
                halt = self._halt if order["halt"] else _kill_self
                arm(Point(**order["point"]), halt)
                self._send({"answer": order["id"]})
            case "go_on":
                self._go_on.set()
                self._send({"answer": order["id"]})
            case _:
                loop, handler = self._program.result()
                loop.call_soon_threadsafe(self._begin, order, handler)

    def _begin(self, order: Message, handler: Handler) -> None:
        task = asyncio.create_task(self._serve(order, handler))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, order: Message, handler: Handler) -> None:
        self._send({"answer": order["id"], **await handler(order)})

    def _halt(self) -> None:
        self._send({"event": "reached"})
        self._go_on.wait()

    def _send(self, message: Message) -> None:
        with self._sending:
            self._orders.send_bytes(json.dumps(message).encode())


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _service(desk: Desk, settings: Settings) -> None:
    common = CommonConfig(output_dir=Path(settings["directory"]), run=RUN)
    desk.open(_refuse)
    await weightsync.app.serve(common, WeightSyncConfig.model_validate(settings["config"]))


async def _refuse(order: Message) -> Message:
    return {"error": f"a service takes no order {order['do']!r}"}


async def _trainer(desk: Desk, settings: Settings) -> None:
    """Push what is asked for; the caller repeats what failed, as a trainer does."""
    vars(weightsync.publisher)["HOST_DIRECTORY"] = Path(settings["host_dir"])  # shared memory of this world alone
    async with connect(settings["target"], SecurityConfig()) as channel:
        publisher = WeightPublisher(channel, RUN, chunk_bytes=CHUNK_BYTES, local=settings["local_files"])

        async def push(order: Message) -> Message:
            version = Version.parse(order["version"])
            try:
                report = await publisher.update(version, tensors_of(version), deadline_s=order["deadline_s"])
            except SluiceError as error:
                return {"error": str(error), "code": error.code.name, "reason": error.reason}
            return {"duplicate": report.duplicate, "kind": report.kind}

        desk.open(push)
        await asyncio.Event().wait()


async def _engine(desk: Desk, settings: Settings) -> None:
    weightsync.receive.sources._SILENCE_S = settings["silence_s"]
    engine = Engine()
    async with connect(settings["target"], SecurityConfig()) as channel:
        limits = PullLimits(idle_s=settings["silence_s"], attempts=settings["attempts"])
        receiver = WeightReceiver(
            channel,
            RUN,
            settings["replica"],
            Path(settings["stage_dir"]),
            engine,
            options=ReceiverOptions(
                pull=limits,
                local_files=settings["local_files"],
                connect_to=lambda address: connect(address, SecurityConfig(), role="agent"),
                sources=_SOURCES,
            ),
        )

        async def answer(order: Message) -> Message:
            if order["do"] == "probe":
                return await engine.probe()
            status = receiver.status()
            fallbacks = [REGISTRY.get_sample_value("sluice_weights_fallbacks_total", {"way": way}) for way in _WAYS]
            return {
                "connected": status.connected,
                "error": status.last_error,
                "fallbacks": sum(each or 0 for each in fallbacks),
            }

        following = asyncio.create_task(receiver.run_forever())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, following.cancel)
        desk.open(answer)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await following
        finally:
            await receiver.close()
