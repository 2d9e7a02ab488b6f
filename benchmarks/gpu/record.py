"""The file of JSON that parts append to, which parts are still due, and the table of what it holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.gpu.parts import PARTS, Part
from sluice.config import ConfigError
from sluice.config.footprint import GIB
from sluice.host_files import write_whole

FORMAT = 1

MEASURED, FAILED, NOT_RUN, INCOMPLETE = "measured", "failed", "not run", "incomplete"
"""Outcomes of a part. A measurement has one of the first three. A part is incomplete while it runs, or if the run was killed."""

SHOWN = (
    *("tokens_per_s", "mfu", "peak_bytes", "estimate_over_peak", "fits", "both_ms", "tflops", "gb_s", "device_gb_s"),
    *("start_s", "mean_nats", "largest_nats", "versions_in_one_request", "median_pause_s", "plain_copy_s", "outcome"),
    *("micro_batches", "output", "query_gradient", "changed_fraction", "seconds", "wrong", "passed", "skipped"),
    *("state", "wall_s", "step_s_mean", "mismatch_kl_mean"),
)
"""Figures of the table, in this order."""

MOST_SHOWN = 5


@dataclass(slots=True)
class Record:
    """The measurements so far, written to disk after each one.

    Attributes:
        content: See docs/benchmarks-gpu.md.
    """

    path: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, path: Path, *, shape: str, device: str) -> Self:
        """Read a file, or begin one.

        Raises:
            ConfigError: if the file is something else, or has figures of another shape or device.
        """
        own = {"format": FORMAT, "shape": shape, "device": device}
        if not path.exists():
            return cls(path, {**own, "parts": {}})
        try:
            content = json.loads(path.read_text())
            found = {name: content[name] for name in own}
            parts = content["parts"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no file of `sluice bench gpu` ({error}): name another one with --into"
            ) from error
        if found != own:
            raise ConfigError(f"{path} has figures of {found}, not of {own}: name another file with --into")
        return cls(path, {**own, "parts": parts})

    def outcome(self, part: Part) -> str | None:
        """Return the outcome of a part; None if it has none yet."""
        found = self.content["parts"].get(part.name)
        return None if found is None else str(found["outcome"])

    def due(self, wanted: Sequence[Part]) -> list[Part]:
        """Return the parts to run: the wanted ones; if none are named, all that have neither been measured nor failed."""
        return list(wanted) or [part for part in PARTS if self.outcome(part) not in {MEASURED, FAILED}]

    def begin(self, part: Part) -> None:
        """Begin a part, and forget its earlier measurements."""
        self.content["parts"][part.name] = {"outcome": INCOMPLETE, "measurements": {}}
        self._write()

    def add(self, part: Part, name: str, found: Mapping[str, Any]) -> None:
        """Add a measurement of a part."""
        self.content["parts"][part.name]["measurements"][name] = _finite(found)
        self._write()

    def end(
        self, part: Part, *, seconds: float, machine: Mapping[str, Any], reason: str = "", failed: bool = False
    ) -> None:
        """End a part. It counts as measured if it has measurements and nothing failed.

        Args:
            part: The part.
            seconds: Seconds that it took.
            machine: Machine that it ran on.
            reason: Why it did not run, or did not complete.
            failed: Whether it did not complete.
        """
        entry = self.content["parts"][part.name]
        outcomes = {each["outcome"] for each in entry["measurements"].values()}
        entry["outcome"] = FAILED if failed or FAILED in outcomes else MEASURED if MEASURED in outcomes else NOT_RUN
        entry |= {"seconds": round(seconds, 1), "machine": dict(machine)} | ({"reason": reason} if reason else {})
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(self.content, indent=1) + "\n")


def _finite(value: Any) -> Any:  # noqa: ANN401 - what JSON can hold
    """Return a value with null for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(content: Mapping[str, Any]) -> list[str]:
    """Return one line for each part and measurement, with the most important figures."""
    lines = []
    for number, part in enumerate(PARTS, 1):
        found = content["parts"].get(part.name, {"outcome": "not yet", "measurements": {}})
        seconds = f"{found['seconds']:.0f} s" if "seconds" in found else ""
        lines.append(
            f"{number:>2}  {part.name:<14}{found['outcome']:<12}{seconds:<8}{found.get('reason', '')}".rstrip()
        )
        for name, each in found["measurements"].items():
            said = each.get("reason") or ", ".join(_shown(each["figures"]))
            lines.append(f"    {name:<48}{each['outcome']:<10}{said}".rstrip())
    return lines


def _shown(figures: Mapping[str, Any]) -> Iterable[str]:
    present = [name for name in SHOWN if figures.get(name) is not None]
    for name in present[:MOST_SHOWN]:
        value = figures[name]
        if name.endswith("_bytes"):
            yield f"{name.removesuffix('_bytes')} {value / GIB:.2f} GiB"
        else:
            yield f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
