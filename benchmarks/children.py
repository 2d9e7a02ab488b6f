"""Helpers of benchmarks: directories, models, services, work in a child process, the memory of a process, ratios of neighbours."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

from sluice.cli.init_model import ModelShape, init_model
from sluice.config import SecurityConfig
from sluice.rpc.channel import wait_until_serving
from sluice.rpc.server import free_ports
from sluice.tasks import discard_outcome

_Words = ParamSpec("_Words")
_Result = TypeVar("_Result")

BENCH_PACKAGES = Path(__file__).parents[1] / ".venv-bench"
"""Where `make install-bench` puts packages that only benchmarks compare with."""

MODEL_2M = ModelShape(hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, mlp=768)
"""2.6 million parameters, the size used for the figures in the documentation."""


def median_ratio(ones: Iterable[float], others: Iterable[float]) -> float:
    """Return the median of one / other over the rounds. Measurements in the same round ran under the same conditions."""
    return round(statistics.median(one / other for one, other in zip(ones, others, strict=True)), 3)


@contextlib.contextmanager
def scratch(keep: Path | None) -> Iterator[Path]:
    """Yield a directory for a benchmark's files: the new one that the user wants to keep, else one that is removed at the end."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        yield Path(name).resolve()


def make_model(directory: Path, shape: ModelShape = MODEL_2M, *, seed: int = 0) -> Path:
    """Make a model with random weights and return its directory."""
    init_model(directory, shape, seed=seed)
    return directory


def free_port() -> int:
    """Return a TCP port on loopback that was free a moment ago."""
    return free_ports(1)[0]


def in_child(work: Callable[_Words, _Result], *words: _Words.args, **options: _Words.kwargs) -> _Result:
    """Run a function in a process of its own, so that this process keeps neither its threads nor its memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *words, **options).result()


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
        health: Its ``host:port``; the block begins when it serves there.
        log: File for its output.
        start_s: Seconds until it must serve.
        cpus: Cores that it may use; None leaves all.
        environment: None inherits ours.

    Raises:
        RuntimeError: if it ends or does not serve in time; the end of its log is in the message.
    """
    pin = (lambda: os.sched_setaffinity(0, cpus)) if cpus else None
    command = (sys.executable, "-m", "sluice.cli.main", name, *arguments)
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, preexec_fn=pin, env=environment
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


@contextlib.asynccontextmanager
async def program(module: str, *words: str, log: Path, **environment: str) -> AsyncIterator[psutil.Process]:
    """Run a module of Python as a process until the block ends."""
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *words, stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        yield psutil.Process(child.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            await asyncio.wait_for(child.wait(), 20)
        except TimeoutError:
            child.kill()
            await child.wait()


async def _healthy(child: asyncio.subprocess.Process, target: str, log: Path, start_s: float) -> None:
    ended = asyncio.create_task(child.wait())
    serving = asyncio.create_task(wait_until_serving(target, SecurityConfig()))
    try:
        await asyncio.wait({ended, serving}, timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise RuntimeError(f"the service ended with code {ended.result()}:\n{log_tail(log)}")
        if not serving.done():
            raise RuntimeError(f"{target} did not serve within {start_s:.0f} s:\n{log_tail(log)}")
    finally:
        ended.cancel()
        serving.cancel()
        discard_outcome(ended, serving)


def log_tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


class PeakMemory:
    """The largest resident set since `restart`, above what the process held when this object was made.

    Make it after the imports and before the model is loaded, so that weights count and libraries do not.
    """

    def __init__(self) -> None:
        self._before = psutil.Process().memory_info().rss

    @staticmethod
    def restart() -> None:
        """Forget the peak so far; see proc(5), clear_refs."""
        Path("/proc/self/clear_refs").write_text("5")

    @property
    def bytes(self) -> int:
        """The peak above the start, in bytes."""
        lines = Path("/proc/self/status").read_text().splitlines()
        peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return peak_kib * 1024 - self._before
