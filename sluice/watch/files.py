"""Read a run from its directory, even while it lives: only new and complete lines."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.config import CommonConfig
from sluice.run_files import METRICS_FILE, REPORT_FILE, TRAJECTORIES
from sluice.watch.rules import Machine, Row
from sluice.watch.watch import Watch

_OF_A_STEP = "completion/mean_tokens"
"""A metric that every step has, and no evaluation has."""

_MOST_BYTES = 64 << 20
"""Most bytes of new lines to read at once. The next call reads the rest."""


class NewLines:
    """Reads the lines of a file that are new since the last reading. A file that became shorter is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def read(self) -> list[bytes]:
        """Return the new complete lines; none if there is no file.

        Raises:
            OSError: if the file is there and cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._position:
                    self._position = 0
                file.seek(self._position)
                text = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return []
        whole, _, _ = text.rpartition(b"\n")
        if not whole:
            return []
        self._position += len(whole) + 1
        return whole.split(b"\n")


def watch_of(config: CommonConfig) -> Watch:
    """Return a watch of a run, fed with the steps that earlier processes of the run recorded. Blocks.

    Raises:
        OSError: if the run's metrics are there and cannot be read.
    """
    watch = Watch(config.watch, config.max_staleness)
    for row in RunFiles(config.run_dir).new_steps():
        watch.step(row)
    return watch


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of an evaluation after a step."""

    step: int
    time: float
    values: Mapping[str, float]


class RunFiles:
    """The files of a run.

    Args:
        run_dir: Its directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._metrics = NewLines(run_dir / METRICS_FILE)

    def new_rows(self) -> Iterator[Row | Evaluation]:
        """Yield steps and evaluations that were written since the last call, in their order.

        Raises:
            OSError: if the file is there and cannot be read.
        """
        while lines := self._metrics.read():
            yield from filter(None, map(_row, lines))

    def new_steps(self) -> Iterator[Row]:
        """Yield the steps among `new_rows`."""
        return (row for row in self.new_rows() if isinstance(row, Row))

    def report(self) -> Mapping[str, Any] | None:
        """Return the report of the run; None if there is no readable report."""
        try:
            found = json.loads((self.run_dir / REPORT_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def samples(self) -> Iterator[Mapping[str, Any]]:
        """Yield the trajectories of all steps whose texts are still there, the newest step first."""
        for path in sorted((self.run_dir / TRAJECTORIES).glob("step_*.jsonl"), reverse=True):
            try:
                lines = path.read_bytes().splitlines()
            except FileNotFoundError:
                continue  # a live run removed it, to stay below orchestrator.disk.trajectories_mb
            for line in lines:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue

    def machine(self) -> Machine:
        """Return the free space on the disk of the run's directory, and the free memory of this machine.

        Raises:
            OSError: if the directory does not exist.
        """
        return Machine(shutil.disk_usage(self.run_dir).free, _available_share())


def _row(line: bytes) -> Row | Evaluation | None:
    """Return a line of ``metrics.jsonl``; None if a kill or a full disk left it torn."""
    try:
        fields = json.loads(line)
        step, time = int(fields.pop("step")), float(fields.pop("time", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    values = {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}
    kind = Row if _OF_A_STEP in values else Evaluation
    return kind(step, time, values)


def _available_share() -> float:
    """Return the fraction of this machine's memory that is available; 1 if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 1.0
    sizes = {name: float(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
    total = sizes.get("MemTotal", 0.0)
    share = sizes.get("MemAvailable", total) / total if total else 1.0
    return share if math.isfinite(share) else 1.0
