"""The yardsticks of a dense transfer: the same bytes over two bare gRPC hops and over two bare TCP hops.

A server stores what it is sent in a file, and sends what it has stored; the client writes that to a file again. As on the
weight path, the second hop begins when the first has ended. Run as a program, this is the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc

from benchmarks.children import free_port

__all__ = ["RawServer", "grpc_hops", "raw_server", "tcp_hops"]

CHUNK_BYTES = 1 << 20
DEADLINE_S = 300.0
OPTIONS = [("grpc.max_receive_message_length", 4 << 20), ("grpc.max_send_message_length", 4 << 20)]


async def grpc_hops(target: str, data: memoryview, file: Path) -> float:
    """Seconds for bytes to the server's disk and from there into a file."""
    async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
        begun = time.perf_counter()
        push: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary("/raw/Push")
        await push(_chunks(data), timeout=DEADLINE_S)
        pull: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/raw/Pull")
        with file.open("wb", buffering=0) as output:
            async for chunk in pull(b"", timeout=DEADLINE_S):
                await asyncio.to_thread(output.write, chunk)
        return time.perf_counter() - begun


async def _chunks(data: memoryview) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), CHUNK_BYTES):
        yield bytes(data[begin : begin + CHUNK_BYTES])


def tcp_hops(port: int, data: memoryview, file: Path) -> float:
    """The same through two plain sockets, one after the other."""
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
            raise ConnectionError("the raw server left")
        size -= count
        yield memoryview(buffer)[:count]


class RawServer:
    """Addresses of a server that is up: gRPC target and TCP port."""

    def __init__(self) -> None:
        self.tcp_port = free_port()
        self.grpc_port = free_port()

    @property
    def target(self) -> str:
        """Of gRPC."""
        return f"127.0.0.1:{self.grpc_port}"


@contextlib.asynccontextmanager
async def raw_server(directory: Path) -> AsyncIterator[RawServer]:
    """Run the server in a process of its own."""
    server = RawServer()
    words = ["-m", "benchmarks.weights.raw", str(server.grpc_port), str(server.tcp_port), str(directory / "raw.bin")]
    child = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    try:
        if child.stdout is None or not await asyncio.wait_for(child.stdout.readline(), 60):
            raise RuntimeError("the raw server did not start")
        yield server
    finally:
        child.terminate()
        await child.wait()


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, file: Path) -> None:
        self._file = file

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        if details.method == "/raw/Push":
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
