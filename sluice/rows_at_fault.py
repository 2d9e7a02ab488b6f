"""The indices of trajectories at fault, with which a trainer refuses a batch.

An error carries few violations, and a batch has up to 16,384 trajectories. So the error's metadata has the indices as "0-15,17".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sluice.limits import MAX_TRAJECTORIES

ROWS = "trajectories"
"""Key of the refusal's metadata."""

_CHARACTERS = 500
"""Most characters of the indices: an error cuts longer metadata."""

_ROW = re.compile(r"trajectories\[(\d{1,9})\]")


def rows_of(fields: Iterable[str]) -> frozenset[int]:
    """Return the indices in the names of fields at fault, such as ``trajectories[3].mask_runs``."""
    return frozenset(int(found[1]) for field in fields if (found := _ROW.match(field)))


def ranges(rows: Iterable[int], most_characters: int = _CHARACTERS) -> str:
    """Return numbers as "0-15,17", as many as fit. Without the trajectories named first, the next refusal names the rest."""
    said: list[str] = []
    run: list[int] = []
    for each in [*sorted(rows), -1]:
        if run and each != run[-1] + 1:
            said.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        run.append(each)
    text = ",".join(said)
    return text if len(text) <= most_characters else text[:most_characters].rpartition(",")[0]


def numbers(text: str) -> Iterator[int]:
    """Yield the numbers in a text from `ranges`; nothing for any other text."""
    for first, last in re.findall(r"(\d{1,9})(?:-(\d{1,9}))?", text):
        yield from range(int(first), min(int(last or first), MAX_TRAJECTORIES) + 1)
