"""``trajectories/step_*.jsonl``: the trajectories of each step as text, for people and for `sluice rescore`.

Nothing that continues, forks or audits a run reads them: together they have a bound, and those of the oldest steps go.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import structlog

from sluice.host_files import write_whole

log = structlog.get_logger(__name__)

_NAME = "step_"


class TrajectoryFiles:
    """Writes one file for each step, and removes the oldest ones when all are too large together. Every method blocks.

    Args:
        directory: Where they lie; made with the first one.
        most_bytes: Size of all of them; 0: no bound. The one that was written last stays in any case.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory, self._most_bytes = directory, most_bytes
        self._sizes: dict[int, int] | None = None  # by step; None until the files of earlier processes were looked at

    def write(self, step: int, lines: Iterable[str]) -> None:
        """Write the lines of a step, in place of the one of an epoch that was rolled back.

        Raises:
            OSError: if it cannot be written. An old one that cannot be removed is logged.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(step), lines)
        if self._most_bytes:
            self._remove_oldest(step)

    def _remove_oldest(self, newest: int) -> None:
        if self._sizes is None:
            found = {int(path.stem.removeprefix(_NAME)): path for path in self._directory.glob(f"{_NAME}*.jsonl")}
            self._sizes = {step: found[step].stat().st_size for step in sorted(found)}
        self._sizes[newest] = self._path(newest).stat().st_size
        total = sum(self._sizes.values())
        for step in sorted(self._sizes.keys() - {newest}):
            if total <= self._most_bytes:
                return
            try:
                self._path(step).unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot remove old trajectories", path=str(self._path(step)), error=str(error))
                return
            total -= self._sizes.pop(step)

    def _path(self, step: int) -> Path:
        return self._directory / f"{_NAME}{step:06d}.jsonl"
