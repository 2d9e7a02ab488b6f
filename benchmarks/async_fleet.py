"""Weight sync, trainer and replica that stay up while one orchestrator after the other runs on them.

Each session is an orchestrator of its own with its own staleness bound, which takes up the run where the one before it
ended. So the sessions meet the same engine and the same trainer, warm, and no time goes to starting them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import free_port, service
from orchestrator_svc.recorder import read_metrics

__all__ = ["Fleet", "Placement", "fleet"]

SESSION_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Placement:
    """Who computes where.

    Attributes:
        name: Of the run.
        rollout: Cores of the replica; None leaves all.
        trainer: Cores of the trainer; None leaves all.
        threads: Threads of each of the two.
    """

    name: str
    rollout: set[int] | None
    trainer: set[int] | None
    threads: int


@dataclass
class Fleet:
    """Services that are up.

    Attributes:
        rollout: Address of the replica.
    """

    rollout: str
    _name: str
    _directory: Path
    _common: Sequence[str]
    _orchestrator: Sequence[str]
    _steps_so_far: int = 0

    async def session(self, max_staleness: int, steps: int) -> list[Mapping[str, float]]:
        """Run an orchestrator for some steps; returns the metrics of each.

        Raises:
            RuntimeError: if it fails.
            TimeoutError: if it takes longer than its deadline.
        """
        first, self._steps_so_far = self._steps_so_far + 1, self._steps_so_far + steps
        port = free_port()
        arguments = [
            *self._common,
            *self._orchestrator,
            f"--server.port={port}",
            f"--max-staleness={max_staleness}",
            f"--max-steps={self._steps_so_far}",
        ]
        log = self._directory / f"{self._name}-orchestrator-{first}.log"
        async with service("orchestrator", *arguments, health=f"127.0.0.1:{port}", log=log) as child:
            code = await asyncio.wait_for(child.wait(), SESSION_DEADLINE_S)
        if code:
            raise RuntimeError(f"the orchestrator ended with code {code}:\n{log.read_text(errors='replace')[-2000:]}")
        metrics = await asyncio.to_thread(read_metrics, self._directory / self._name / "metrics.jsonl")
        return [metrics[step] for step in range(first, self._steps_so_far + 1)]


@contextlib.asynccontextmanager
async def fleet(
    placement: Placement, directory: Path, model: Path, *, orchestrator: Mapping[str, Any], lr: float
) -> AsyncIterator[Fleet]:
    """Start the services.

    Args:
        placement: Who computes where.
        directory: For everything that they write.
        model: The model.
        orchestrator: Settings of the orchestrators to come.
        lr: Learning rate.
    """
    targets = {name: f"127.0.0.1:{free_port()}" for name in ("weightsync", "trainer", "rollout")}
    common = [f"--run={placement.name}", f"--output-dir={directory}", f"--model={model}", "--log-level=warning"]
    common += [f"--peers.{name}={target}" for name, target in targets.items()]
    own = {
        "weightsync": [],
        "trainer": [f"--lr={lr}", f"--threads={placement.threads}"],
        "rollout": [
            f"--threads={placement.threads}",
            f"--server.http-port={free_port()}",
        ],
    }
    cpus = {"rollout": placement.rollout, "trainer": placement.trainer}
    # OpenMP reads the number of threads before any setting is read.
    environment = {"OMP_NUM_THREADS": str(placement.threads), "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    async with contextlib.AsyncExitStack() as stack:
        for name, target in targets.items():
            arguments = [*common, *own[name], f"--server.port={target.rpartition(':')[2]}"]
            log = directory / f"{placement.name}-{name}.log"
            await stack.enter_async_context(
                service(
                    name,
                    *arguments,
                    health=target,
                    log=log,
                    cpus=cpus.get(name),
                    environment={**os.environ, **environment},
                )
            )
        settings = [f"--{name}={_flag(value)}" for name, value in orchestrator.items()]
        yield Fleet(targets["rollout"], placement.name, directory, common, settings)


def _flag(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
