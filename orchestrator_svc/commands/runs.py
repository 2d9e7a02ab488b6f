"""Find what a command reads: the directory of a run, and the versions of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from orchestrator_svc.journal import DATABASE
from sluice.config import ConfigError

_MANY = 20
"""Steps that a message lists."""


def find_run(name: str, output_dir: Path) -> Path:
    """Return the directory of a run that is given by name or as a directory.

    Raises:
        ConfigError: if there is no journal in either place.
    """
    places = (Path(name), output_dir / name)
    for place in places:
        if (place / DATABASE).exists():
            return place
    raise ConfigError(f"no run {name!r}: there is no {DATABASE} in {' or in '.join(map(str, places))}")


def weight_versions(weights_dir: Path, steps: Sequence[int]) -> list[Path]:
    """Return the directories of the versions of a run's weights, oldest first.

    Raises:
        ConfigError: if it has no versions, or lacks those of some of these steps.
    """
    found = {}
    for each in weights_dir.glob("v*.*"):
        with contextlib.suppress(ValueError):
            epoch, step = each.name[1:].split(".")
            found[int(epoch), int(step)] = each
    there = sorted({step for _, step in found})
    if not there:
        raise ConfigError(
            f"there are no versions in {weights_dir.resolve()}, such as v1.50: give a run's weights directory"
        )
    if missing := sorted(set(steps) - set(there)):
        shown = ", ".join(map(str, there if len(there) < _MANY else [*there[:_MANY], "..."]))
        raise ConfigError(f"{weights_dir} has no step {', '.join(map(str, missing))}; it has {shown}")
    return [path for (_, step), path in sorted(found.items()) if not steps or step in steps]
