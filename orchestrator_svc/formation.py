"""Which ready groups make the next batch: first in, first out, with a window for stragglers, and no deadline missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Candidate", "choose", "window_size"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live group that is in no batch yet.

    Attributes:
        group: Its number; lower ones were dispatched earlier.
        ready: Whether it is scored; otherwise its episodes are under way.
        last_batch: The last batch that may train it.
        passed: Younger groups that were batched while it was under way.
    """

    group: int
    ready: bool
    last_batch: int
    passed: int = 0


def window_size(batch_groups: int, fraction: float) -> int:
    """W: at most W - 1 younger groups may pass the oldest unfinished one."""
    return max(1, int(fraction * batch_groups))


def choose(candidates: Sequence[Candidate], batch: int, size: int, window: int) -> list[int] | None:
    """Choose the groups of a batch, or wait.

    Args:
        candidates: The live groups in no batch, in order of dispatch.
        batch: Sequence number of the batch to make.
        size: Groups per batch.
        window: W of `window_size`.

    Returns:
        Numbers of the chosen groups in order of dispatch; None to wait for groups under way. It never waits unless
        one is under way whose finish (or end by its deadline) changes the answer.
    """
    ready = [each for each in candidates if each.ready]
    if len(ready) < size:
        return None
    first_in = ready[:size]
    most_urgent = sorted(ready, key=lambda each: (each.last_batch, each.group))[:size]
    for picked in (first_in, most_urgent):
        if _fits(candidates, picked, batch, size):
            return None if _overtakes(candidates, picked, window) else sorted(each.group for each in picked)
    if any(
        not each.ready and each.last_batch <= _tightest(candidates, most_urgent, batch, size) for each in candidates
    ):
        return None
    return sorted(each.group for each in most_urgent)


def _overloaded(candidates: Sequence[Candidate], picked: Sequence[Candidate], batch: int, size: int) -> list[int]:
    """Deadlines by which more groups are due than the batches until then can hold, if `picked` is the next batch."""
    chosen = {each.group for each in picked}
    due = sorted(each.last_batch for each in candidates if each.group not in chosen)
    # The i-th most urgent of the rest needs ceil(i / size) further batches.
    return [deadline for place, deadline in enumerate(due) if deadline < batch + 1 + place // size]


def _fits(candidates: Sequence[Candidate], picked: Sequence[Candidate], batch: int, size: int) -> bool:
    return not _overloaded(candidates, picked, batch, size)


def _tightest(candidates: Sequence[Candidate], picked: Sequence[Candidate], batch: int, size: int) -> int:
    return max(_overloaded(candidates, picked, batch, size))


def _overtakes(candidates: Sequence[Candidate], picked: Sequence[Candidate], window: int) -> bool:
    """Whether more younger groups would pass the oldest unfinished one than the window allows."""
    oldest = next((each for each in candidates if not each.ready), None)
    if oldest is None:
        return False
    younger = sum(each.group > oldest.group for each in picked)
    return younger > 0 and oldest.passed + younger > window - 1
