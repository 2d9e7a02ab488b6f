"""Models and services that benchmarks start and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.cli.init_model import ModelShape, init_model

__all__ = ["free_port", "make_model", "service"]

MODEL_2M = ModelShape(hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, mlp=768)
"""2.6 million parameters, the size that the figures in the documentation are for."""


def make_model(directory: Path, shape: ModelShape = MODEL_2M, *, seed: int = 0) -> Path:
    """Make a model with random weights and return its directory."""
    init_model(directory, shape, seed=seed)
    return directory


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def service(
    name: str,
    *arguments: str,
    health: str,
    log: Path,
    start_s: float = 180.0,
    cpus: set[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ``sluice <name> <arguments>`` until the block ends.

    Args:
        name: The service.
        arguments: Words of its command line.
        health: ``host:port`` that it will serve at; waited for.
        log: File that takes its output.
        start_s: How long it may take to serve.
        cpus: Cores that it may use; None leaves all.
        environment: Its environment variables; None inherits ours.

    Raises:
        RuntimeError: if it ends or does not serve in time; the end of its log is in the message.
    """
    pin = (lambda: os.sched_setaffinity(0, cpus)) if cpus else None
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sluice.cli.main",
            name,
            *arguments,
            stdout=output,
            stderr=output,
            preexec_fn=pin,
            env=environment,
        )
    try:
        await _healthy(child, health, log, start_s)
        yield child
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(child.wait(), 15)
            except TimeoutError:
                child.kill()
                await child.wait()


async def _healthy(child: asyncio.subprocess.Process, target: str, log: Path, start_s: float) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        deadline = asyncio.get_running_loop().time() + start_s
        while asyncio.get_running_loop().time() < deadline:
            if child.returncode is not None:
                raise RuntimeError(f"the service ended with code {child.returncode}:\n{_tail(log)}")
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)  # type: ignore[attr-defined]  # as in sluice.cli.launch
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{target} did not serve within {start_s:.0f} s:\n{_tail(log)}")


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
