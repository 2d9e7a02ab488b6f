"""Follow a run from outside: its files, its orchestrator while that answers, and this machine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sluice.client import OrchestratorClient
from sluice.config import RunConfig
from sluice.config.tables import orchestrator_of
from sluice.rpc import SluiceError
from sluice.run_files import JOURNAL_FILE, METRICS_FILE, REPORT_FILE, is_held
from sluice.v1 import orchestrator_pb2
from sluice.watch.files import Evaluation, RunFiles
from sluice.watch.live import STATES, LoadReader
from sluice.watch.rules import Load, Row
from sluice.watch.watch import Finding, Watch, verdict

_ANSWER_S = 5.0
"""Seconds for the orchestrator to answer; a run is followed by its files alone meanwhile."""

_GONE = "gone"
"""The state of a run whose processes ended without a report."""


@dataclass(frozen=True, slots=True)
class Look:
    """What changed in a run since the last look at it.

    Attributes:
        rows: Its new steps and evaluations.
        begun: New findings.
    """

    rows: tuple[Row | Evaluation, ...]
    begun: tuple[Finding, ...]


class FollowedRun:
    """A run, live or ended. Each `look` reads what is new, and updates the attributes.

    Args:
        config: Its settings.
        orchestrator: Answers for it while it lives.
        wall: Returns seconds since 1970.

    Attributes:
        state: Such as "running", "succeeded", "failed", or "gone" if its processes ended without a report.
        error: Why it failed.
        live: Whether a process runs it.
        step: Steps that it has made.
    """

    def __init__(
        self, config: RunConfig, orchestrator: OrchestratorClient, wall: Callable[[], float] = time.time
    ) -> None:
        self.config, self.files = config, RunFiles(config.run_dir)
        self.watch = Watch(config.watch, config.max_staleness)
        self.state, self.error, self.live, self.step = "starting", "", True, 0
        self.rows: list[Row] = []
        self.evaluations: list[Evaluation] = []
        self._orchestrator, self._wall, self._loads = orchestrator, wall, LoadReader()

    @property
    def max_steps(self) -> int:
        """Return how many steps the run is to make; 0 if its settings do not say."""
        orchestrator = orchestrator_of(self.config)
        return 0 if orchestrator is None else orchestrator.max_steps

    @property
    def verdict(self) -> int:
        """Return 0 if nothing is wrong, 1 if somebody should look, 2 if the run is broken or failed."""
        return 2 if self.state in {"failed", _GONE} else verdict(self.watch.findings)

    async def look(self) -> Look:
        """Read what is new.

        Raises:
            OSError: if the run's files cannot be read.
        """
        held = await asyncio.to_thread(is_held, self.config.run_dir)
        run = await self._ask() if held or "orchestrator" in self.config.peers.model_fields_set else None
        rows = tuple(await asyncio.to_thread(lambda: list(self.files.new_rows())))
        begun = [finding for row in rows for finding in self._take(row)]
        now, self.live = self._wall(), held or run is not None
        if self.live:
            self.state, self.error = ("starting" if run is None else STATES.get(run.state, "unknown")), ""
            if run is None:  # only the time has changed
                load = replace(self.watch.history.load or Load(now, running=True), time=now)
            else:
                load = self._loads.read(run, now)
            begun += self.watch.load(load)
            begun += self.watch.machine(await asyncio.to_thread(self.files.machine), now)
        else:
            self.watch.end(now)
            report = await asyncio.to_thread(self.files.report) or {}
            self.state, self.error = str(report.get("state", _GONE)), str(report.get("error") or "")
        return Look(rows, tuple(begun))

    def _take(self, row: Row | Evaluation) -> list[Finding]:
        if isinstance(row, Evaluation):
            self.evaluations.append(row)
            return []
        while self.rows and self.rows[-1].step >= row.step:  # a rollback undid it
            self.rows.pop()
        self.rows.append(row)
        self.step = row.step
        return self.watch.step(row)

    async def _ask(self) -> orchestrator_pb2.Run | None:
        """Return the state from the orchestrator; None if it does not answer, or refuses to answer us."""
        with contextlib.suppress(SluiceError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                return await self._orchestrator.run(self.config.run)
        return None


def runs_below(output_dir: Path) -> list[Path]:
    """Return the directories of the runs in an output directory; the most recently written one comes last."""
    marks = (JOURNAL_FILE, METRICS_FILE, REPORT_FILE)
    found: dict[Path, float] = {}
    for path in output_dir.iterdir() if output_dir.is_dir() else ():
        with contextlib.suppress(OSError):
            times = [mark.stat().st_mtime for name in marks if (mark := path / name).exists()]
            if times:
                found[path] = max(times)
    return sorted(found, key=lambda path: found[path])
