"""Fixtures for benchmarks of the weight path: a weight service, receivers, weights, and a bare server to compare with."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import grpc
import torch

from benchmarks.children import free_port, service
from sluice.cli.init_model import ModelShape, init_model
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.versions import BASE, Version
from weightsync.publisher import PushReport, Update, WeightPublisher
from weightsync.receiver import ReceiverOptions, WeightReceiver
from weightsync.staged import ApplyError, ApplyReport, Engine, HeldVersions, StagedAdapter, StagedVersion

RUN = "bench"
DEADLINE_S = 300.0


class WeightStack:
    """A weight service that is up, and a publisher that pushes to it.

    Attributes:
        pid: Id of its process.
    """

    def __init__(self, target: str, channel: grpc.aio.Channel, pid: int, *, local: bool) -> None:
        self.target, self.pid = target, pid
        self._publisher = WeightPublisher(channel, RUN, local=local)

    async def push(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> float:
        """Publish a version; return when the transfer began, which is after the comparison with the version before."""
        begun, _ = await self.push_measured(version, tensors)
        return begun

    async def push_measured(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> tuple[float, PushReport]:
        """Publish a version; return when the transfer began, and the report on its cost."""
        return await self.publish(await self.encode(version, tensors))

    async def encode(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> Update:
        """Compare a version with the previous one."""
        return await asyncio.to_thread(self._publisher.encode, version, tensors, deadline_s=DEADLINE_S)

    async def publish(self, update: Update) -> tuple[float, PushReport]:
        """Push an encoded version and commit it; return when the transfer began, and the report on its cost."""
        begun = time.perf_counter()
        return begun, await self._publisher.publish(update, deadline_s=DEADLINE_S)


@contextlib.asynccontextmanager
async def weight_service(
    directory: Path, *arguments: str, local: bool = False, name: str = "weightsync"
) -> AsyncIterator[WeightStack]:
    """Run ``sluice weightsync`` until the block ends.

    Args:
        directory: For its versions and its log.
        arguments: Further words of its command line.
        local: Hand files over in shared memory in place of sockets.
        name: Its part of the directory.
    """
    port = free_port()
    target, log = f"127.0.0.1:{port}", directory / f"{name}.log"
    words = [f"--run={RUN}", f"--output-dir={directory / name}", "--log-level=warning", f"--server.port={port}"]
    async with (
        service("weightsync", *words, *arguments, health=target, log=log) as child,
        connect(target, SecurityConfig()) as channel,
    ):
        yield WeightStack(target, channel, child.pid, local=local)


@contextlib.asynccontextmanager
async def receiving(
    target: str, stage_dir: Path, engine: Engine, *, replica: str = "replica-0", local: bool = False
) -> AsyncIterator[WeightReceiver]:
    """Run a receiver that follows until the block ends."""
    async with connect(target, SecurityConfig()) as channel:
        receiver = WeightReceiver(channel, RUN, replica, stage_dir, engine, options=ReceiverOptions(local_files=local))
        task = asyncio.create_task(receiver.run_forever())
        try:
            yield receiver
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await receiver.close()


class StagedOnly:
    """An engine that does not load versions: the measurement ends when the version is staged."""

    serves_adapters = False

    def __init__(self) -> None:
        self.version = BASE

    def held(self) -> HeldVersions:
        """Return the version that was staged last."""
        return HeldVersions(self.version, self.version)

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Remember the version."""
        self.version = staged.version
        return ApplyReport(staged.version, 0.0, 0.0)

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        """Refuse: nothing here pushes adapters."""
        raise ApplyError(f"{staged.version} is an adapter")


async def serves(receivers: list[WeightReceiver], version: Version) -> None:
    """Wait until all receivers serve the version.

    Raises:
        TimeoutError: after the deadline.
    """
    deadline = time.monotonic() + DEADLINE_S
    while any(receiver.status().serving != version for receiver in receivers):
        if time.monotonic() > deadline:
            raise TimeoutError(f"version {version} was not in service within {DEADLINE_S:g} s")
        await asyncio.sleep(0.002)


# Weights.


MODEL_200M = ModelShape(hidden=1024, layers=16, heads=16, kv_heads=8, head_dim=64, mlp=3072)
"""202 million parameters, all but 0.3 million of them in the layers."""

WEIGHT_SCALE = 0.02


def model_200m(directory: Path) -> Path:
    """Make the model in bf16, unless it is there, and return its directory."""
    if not (directory / "config.json").exists():
        init_model(directory, MODEL_200M, dtype="bfloat16")
    return directory


def random_weights(elements: int, *, seed: int, rows: int = 16_384) -> dict[str, torch.Tensor]:
    """Draw normal bf16 weights in matrices of `rows` rows of 1,024, under the names of a checkpoint. The last matrix is complete, too."""
    generator = torch.Generator().manual_seed(seed)
    width, tensors = 1024, {}
    for index in range(-(-elements // (rows * width))):
        tensor = torch.empty(rows, width).normal_(0.0, WEIGHT_SCALE, generator=generator)
        tensors[f"model.layers.{index}.mlp.up_proj.weight"] = tensor.bfloat16()
    return tensors


def neighbour(tensors: dict[str, torch.Tensor], *, seed: int, changed: float = 0.01) -> dict[str, torch.Tensor]:
    """Return the next version: a share of the weights moved by one unit in the last place, as a small step of AdamW does."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in tensors.items():
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        drawn = torch.empty(bits.shape, dtype=torch.int16).random_(generator=generator)  # 0 to 32,767
        moved[name] = (bits + (drawn < 32_768 * changed)).to(bits.dtype).view(tensor.dtype)
    return moved


# The bare server: the same bytes over two bare gRPC hops, or over two bare TCP hops. It stores in a file what it receives, and
# sends what it has stored; the client writes that to a file again. The second hop begins when the first has ended, as on the
# weight path. This module, run as a program, is the server.


CHUNK_BYTES = 1 << 20
OPTIONS = [("grpc.max_receive_message_length", 4 << 20), ("grpc.max_send_message_length", 4 << 20)]


@contextlib.asynccontextmanager
async def bare_server(directory: Path) -> AsyncIterator[tuple[int, int]]:
    """Run the bare server in a process of its own, and yield its ports: gRPC and TCP."""
    ports = free_port(), free_port()
    words = ["-m", "benchmarks.weight_stack", *map(str, ports), str(directory / "bare.bin")]
    child = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    try:
        if child.stdout is None or not await asyncio.wait_for(child.stdout.readline(), 60):
            raise RuntimeError("the bare server did not start")
        yield ports
    finally:
        child.terminate()
        await child.wait()


async def grpc_hops(port: int, data: memoryview, file: Path) -> float:
    """Return the seconds for bytes to the server's disk and from there into a file."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        begun = time.perf_counter()
        push: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary("/bare/Push")
        await push(_chunks(data), timeout=DEADLINE_S)
        pull: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/bare/Pull")
        with file.open("wb", buffering=0) as output:
            async for chunk in pull(b"", timeout=DEADLINE_S):
                await asyncio.to_thread(output.write, chunk)
        return time.perf_counter() - begun


async def _chunks(data: memoryview) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), CHUNK_BYTES):
        yield bytes(data[begin : begin + CHUNK_BYTES])


def tcp_hops(port: int, data: memoryview, file: Path) -> float:
    """Return the seconds for the same transfer through two plain sockets, one after the other."""
    begun = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.sendall(b"s" + len(data).to_bytes(8, "little"))
        connection.sendall(data)
        connection.recv(1)
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.sendall(b"g" + len(data).to_bytes(8, "little"))
        with file.open("wb", buffering=0) as output:
            for chunk in _received(connection, len(data)):
                output.write(chunk)
    return time.perf_counter() - begun


def _received(connection: socket.socket, size: int) -> Iterator[memoryview]:
    buffer = bytearray(CHUNK_BYTES)
    while size:
        count = connection.recv_into(buffer, min(size, CHUNK_BYTES))
        if not count:
            raise ConnectionError("the peer closed the connection")
        size -= count
        yield memoryview(buffer)[:count]


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, file: Path) -> None:
        self._file = file

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        if details.method == "/bare/Push":
            return grpc.stream_unary_rpc_method_handler(self._push)
        return grpc.unary_stream_rpc_method_handler(self._pull)

    async def _push(self, chunks: AsyncIterator[bytes], _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        with self._file.open("wb", buffering=0) as output:
            async for chunk in chunks:
                await asyncio.to_thread(output.write, chunk)
            await asyncio.to_thread(os.fsync, output.fileno())
        return b""

    async def _pull(self, _: bytes, __: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        with self._file.open("rb", buffering=0) as source:
            while chunk := await asyncio.to_thread(source.read, CHUNK_BYTES):
                yield chunk


async def _serve(grpc_port: int, tcp_port: int, file: Path) -> None:
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((_Handler(file),))
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await server.start()
    listener = socket.create_server(("127.0.0.1", tcp_port))
    print("ready", flush=True)
    await asyncio.to_thread(_serve_tcp, listener, file)


def _serve_tcp(listener: socket.socket, file: Path) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            kind, size = connection.recv(1), int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
            if kind == b"s":
                with file.open("wb", buffering=0) as output:
                    for chunk in _received(connection, size):
                        output.write(chunk)
                    os.fsync(output.fileno())
                connection.sendall(b"k")
            else:
                with file.open("rb") as source:
                    connection.sendfile(source)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
