"""A weight service, relays of it, and receivers behind them, in one process, over links that count their bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import torch
from held_ports import held_ports
from safetensors.torch import load_file
from weightsync_stack import RESOURCE, RUN, EngineDouble, following

from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, SecurityConfig, ServerConfig
from sluice.rpc import connect
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.app import Serving, serving
from weightsync.config import WeightSyncConfig
from weightsync.publisher import WeightPublisher
from weightsync.receive.pull import PullLimits
from weightsync.receiver import ReceiverOptions, WeightReceiver
from weightsync.staged import ApplyReport, StagedVersion

LIMITS = PullLimits(idle_s=60, attempts=5, first_pause_s=0.01)


class Link:
    """A TCP proxy that counts bytes, and can be cut, taken down, or made to stall.

    Attributes:
        address: Where it listens.
        received: Bytes that the target sent.
        sent: Bytes that were sent to the target.
        down: While set, connections are broken as soon as they are made.
        stall_at: Bytes of either direction after which nothing passes until this is None again.
        damage: Blocks that come back and get a wrong byte on the way, from the next large one on.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self.received = 0
        self.sent = 0
        self.down = False
        self.stall_at: int | None = None
        self.damage = 0
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def stalls(self) -> bool:
        return self.stall_at is not None and max(self.received, self.sent) >= self.stall_at

    def reset(self) -> tuple[int, int]:
        """Return the bytes sent and received since the last call."""
        counted = self.sent, self.received
        self.sent = self.received = 0
        return counted

    def cut(self) -> None:
        """Break every connection; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, back, comes_back=False))
                tasks.create_task(self._copy(there, writer, comes_back=True))
        finally:
            self._writers -= {writer, back}

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, comes_back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 18):
                while self.stalls and not target.is_closing():  # noqa: ASYNC110 - a test changes the bound
                    await asyncio.sleep(0.01)
                if comes_back and self.damage and len(data) >= 1 << 14:
                    self.damage -= 1
                    data = data[:-1] + bytes([data[-1] ^ 1])
                if comes_back:
                    self.received += len(data)
                else:
                    self.sent += len(data)
                target.write(data)
                await target.drain()
        target.close()


@asynccontextmanager
async def linked(target: str) -> AsyncIterator[Link]:
    link = Link(target)
    await link.open()
    try:
        yield link
    finally:
        await link.close()


class Node:
    """A weight service, root or relay, that can be stopped and started again on its port and directory."""

    def __init__(
        self, directory: Path, security: SecurityConfig | None = None, *, clock: Clock = CLOCK, **settings: object
    ) -> None:
        self.directory = directory / RUN / "weights"
        self._held = ExitStack()  # closed when this object goes
        (self._port,) = self._held.enter_context(held_ports(1))
        self.clock = clock
        self._common = CommonConfig(output_dir=directory, run=RUN, security=security or SecurityConfig())
        self.settings = settings
        self._stack = AsyncExitStack()
        self.service: Serving | None = None

    @property
    def serving(self) -> Serving:
        assert self.service is not None
        return self.service

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        config = WeightSyncConfig.model_validate(
            {"server": ServerConfig(port=self._port, drain_s=0), "min_free_bytes": 0, "keep": 5, **self.settings}
        )
        self.service = await self._stack.enter_async_context(serving(self._common, config, clock=self.clock))

    async def stop(self) -> None:
        self.service = None
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()

    def newest(self) -> Version | None:
        return next(iter(self.serving.runs)).ledger.newest


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


class Engine(EngineDouble):
    """A receiver whose engine keeps the tensors that it was given."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.tensors: dict[str, torch.Tensor] = {}

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        self.tensors = load_file(staged.path)
        self.version = staged.version
        return ApplyReport(staged.version, 0.0, 0.0)

    @asynccontextmanager
    async def receiving(
        self, target: str, stage_dir: Path, *, clock: Clock = CLOCK, **options: object
    ) -> AsyncIterator[WeightReceiver]:
        async with connect(target, SecurityConfig()) as channel:
            chosen = ReceiverOptions(**{"pull": LIMITS, **options})  # type: ignore[arg-type]
            receiver = WeightReceiver(channel, RUN, self.name, stage_dir, self, options=chosen, clock=clock)
            async with following(receiver):
                yield receiver


async def push(node: Node, version: Version, tensors: dict[str, torch.Tensor]) -> None:
    async with connect(node.target, SecurityConfig()) as channel:
        await WeightPublisher(channel, RUN, chunk_bytes=1 << 18).update(version, tensors, deadline_s=60)


async def listing(node: Node) -> pb.ListVersionsResponse:
    async with connect(node.target, SecurityConfig()) as channel:
        stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
        return await stub.ListVersions(pb.ListVersionsRequest(run=RESOURCE), timeout=60)


async def sources(node: Node) -> list[pb.WeightSource]:
    async with connect(node.target, SecurityConfig()) as channel:
        stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        return list((await stub.ListSources(pb.ListSourcesRequest(run=RESOURCE), timeout=60)).sources)
