"""A rollout replica of one's own for the length of an evaluation."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from orchestrator_svc.eval_config import EvalConfig
from orchestrator_svc.replicas import ReplicaPool
from sluice.config import ConfigError
from sluice.rpc.binding import LOOPBACK, free_ports
from sluice.supervise.child_process import Watchdog
from sluice.versions import BASE

__all__ = ["started_replica", "wait_ready"]

RUN = "eval"

_STOP_S = 15.0
"""Seconds between SIGTERM and SIGKILL."""

_TAIL_LINES = 20


class StartedReplica:
    """A running child.

    Attributes:
        target: Its address.
    """

    def __init__(self, process: asyncio.subprocess.Process, target: str, log_path: Path) -> None:
        self.target = target
        self._process, self._log_path = process, log_path

    async def died(self) -> str:
        """Wait for its end; returns why, with the last lines of its log."""
        code = await self._process.wait()
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"the replica ended with exit code {code}; its last lines:", *lines])

    async def stop(self) -> None:
        """End it: SIGTERM, then SIGKILL."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def started_replica(config: EvalConfig) -> AsyncIterator[StartedReplica]:
    """Start ``sluice rollout`` on the model, without weight sync; it is ended on the way out, also if we are killed."""
    port = free_ports(1)[0]
    argv = [sys.executable, "-m", "sluice.cli.main", "rollout", "--model", config.model, "--run", RUN]
    settings = {
        "engine": config.engine,
        "follow_weights": "false",
        "server.host": LOOPBACK,
        "server.port": str(port),
        "server.http_port": "none",
        **({} if config.max_model_len is None else {"max_model_len": str(config.max_model_len)}),
        **{name: str(value) for name, value in config.rollout.items()},
    }
    for name, value in settings.items():
        argv += [f"--rollout.{name}", value]
    with tempfile.TemporaryDirectory(prefix="sluice-eval-") as directory:
        log_path = Path(directory) / "rollout.log"
        watchdog = await Watchdog.start()
        try:
            with log_path.open("wb") as log:
                process = await watchdog.start_child(argv, stdout=log, stderr=log)
            replica = StartedReplica(process, f"{LOOPBACK}:{port}", log_path)
            try:
                yield replica
            finally:
                await replica.stop()
                watchdog.note("-", process.pid)
        finally:
            await watchdog.stop()


async def wait_ready(pool: ReplicaPool, replica: StartedReplica | None, deadline_s: float) -> None:
    """Wait until the pool has a replica that serves.

    Raises:
        ConfigError: if it died, or is not there in time.
    """
    ready = asyncio.create_task(pool.choose(BASE))
    died = asyncio.create_task(replica.died()) if replica is not None else None
    waits = {ready, died} - {None}
    try:
        await asyncio.wait(waits, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if died is not None and died.done():
            raise ConfigError(died.result())
        if not ready.done():
            reasons = (
                "; ".join(f"{each.target} {each.why_not()}" for each in pool.replicas) or "the name does not resolve"
            )
            raise ConfigError(f"no rollout server within {deadline_s:g} s: {reasons}")
    finally:
        for each in waits:
            if each is not None:
                each.cancel()
