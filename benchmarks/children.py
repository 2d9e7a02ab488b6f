"""Models and services that benchmarks start and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from sluice.cli.init_model import ModelShape, init_model
from sluice.config import SecurityConfig
from sluice.rpc.access import free_ports
from sluice.rpc.channel import wait_until_serving
from sluice.tasks import discard_outcome

__all__ = ["free_port", "make_model", "service"]

MODEL_2M = ModelShape(hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, mlp=768)
"""2.6 million parameters, the size that the figures in the documentation are for."""


def make_model(directory: Path, shape: ModelShape = MODEL_2M, *, seed: int = 0) -> Path:
    """Make a model with random weights and return its directory."""
    init_model(directory, shape, seed=seed)
    return directory


def free_port() -> int:
    """Return a TCP port on loopback that was free a moment ago."""
    return free_ports(1)[0]


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
    ended, serving = (
        asyncio.create_task(child.wait()),
        asyncio.create_task(wait_until_serving(target, SecurityConfig())),
    )
    try:
        await asyncio.wait({ended, serving}, timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise RuntimeError(f"the service ended with code {ended.result()}:\n{_tail(log)}")
        if not serving.done():
            raise RuntimeError(f"{target} did not serve within {start_s:.0f} s:\n{_tail(log)}")
    finally:
        ended.cancel()
        serving.cancel()
        discard_outcome(ended, serving)


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
