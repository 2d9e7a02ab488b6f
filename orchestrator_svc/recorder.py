"""What a run leaves for people: metrics.jsonl and TensorBoard, every trajectory, the report. Written by one thread."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orchestrator_svc.report import build_report, read_metrics
from orchestrator_svc.staleness import Lineage
from orchestrator_svc.trajectory_files import trajectory_row, write_trajectories
from sluice.telemetry import MetricsWriter
from sluice.v1 import orchestrator_pb2

__all__ = ["Recorder"]

_WAITING = 16
"""Writes that may wait; then the run waits for the disk."""


class Recorder:
    """Writes beside the run.

    Args:
        run_dir: The run's directory.
        write_text: Also write the trajectories.
    """

    def __init__(self, run_dir: Path, *, write_text: bool) -> None:
        self._run_dir, self._write_text = run_dir, write_text
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._writer: MetricsWriter | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        records: Sequence[orchestrator_pb2.TrajectoryRecord],
        lineage: Lineage,
    ) -> None:
        """Record one applied batch; returns before it is written unless the disk is far behind.

        Raises:
            OSError: if an earlier write failed.
        """

        def write() -> None:
            self._metrics().write(step, metrics)
            if self._write_text:
                rows = [trajectory_row(record, lineage) for record in records]
                write_trajectories(self._run_dir / "trajectories" / f"step_{step:06d}.jsonl", rows)

        await self._soon(write)

    async def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record scalars of an evaluation."""
        await self._soon(lambda: self._metrics().write(step, metrics))

    async def report(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``report.json`` from all steps recorded so far and some facts of the run; returns it."""

        def write() -> dict[str, Any]:
            self._metrics().flush()
            report = build_report(read_metrics(self._run_dir / "metrics.jsonl"), facts)
            staging = self._run_dir / ".report.json"
            staging.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            staging.replace(self._run_dir / "report.json")
            return report

        await self._drain(0)
        return await asyncio.get_running_loop().run_in_executor(self._thread, write)

    async def close(self) -> None:
        """Write what waits and close the files."""
        try:
            await self._drain(0)
        finally:
            if self._writer is not None:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.close)
            self._thread.shutdown()

    def _metrics(self) -> MetricsWriter:
        if self._writer is None:
            self._writer = MetricsWriter(self._run_dir)
        return self._writer

    async def _soon(self, write: Callable[[], None]) -> None:
        self._waiting.append(asyncio.get_running_loop().run_in_executor(self._thread, write))
        await self._drain(_WAITING)

    async def _drain(self, left: int) -> None:
        while len(self._waiting) > left or (self._waiting and self._waiting[0].done()):
            await self._waiting.popleft()
