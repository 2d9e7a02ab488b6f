"""Peak memory of this process, measured anew from any point on."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["PeakMemory"]


class PeakMemory:
    """The largest resident set since `restart`, above what the process held when this was made.

    Make it after the imports and before the model is loaded: then libraries do not count, weights and all later do.
    """

    def __init__(self) -> None:
        self._before = psutil.Process().memory_info().rss

    @staticmethod
    def restart() -> None:
        """Forget the peak so far; see proc(5), clear_refs."""
        Path("/proc/self/clear_refs").write_text("5")

    @property
    def bytes(self) -> int:
        """The peak above the start."""
        lines = Path("/proc/self/status").read_text().splitlines()
        peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return peak_kib * 1024 - self._before
