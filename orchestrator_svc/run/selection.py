"""Which groups make the next batch: first in, first out within a window, unless others would come too late.

A pure data structure. It keeps the groups in the orders in which a choice reads them, so that a choice costs as much as the
batch is large, however many groups wait.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice


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


class Selection:
    """The groups to choose from.

    Args:
        size: Groups per batch.
        window: W of `window_size`.
        late_is_due: Treat a group whose last batch is over as due now: its stale tokens are cut.
    """

    def __init__(self, size: int, window: int, *, late_is_due: bool = False) -> None:
        self._size, self._window, self._late_is_due = size, window, late_is_due
        self._candidates: dict[int, Candidate] = {}
        self._due: Counter[int] = Counter()
        # Numbers of groups, ascending.
        self._running: list[int] = []
        self._ready: list[int] = []
        self._ready_by_deadline: dict[int, list[int]] = {}
        self._running_by_deadline: Counter[int] = Counter()

    def put(self, candidate: Candidate) -> None:
        """Add a group, or change what is known of it."""
        group, ready, last_batch = candidate.group, candidate.ready, candidate.last_batch
        before = self._candidates.get(group)
        if before is not None and (before.ready, before.last_batch) == (ready, last_batch):
            self._candidates[group] = candidate
            return
        self.discard(group)
        self._candidates[group] = candidate
        self._due[last_batch] += 1
        bisect.insort(self._ready if ready else self._running, group)
        if ready:
            bisect.insort(self._ready_by_deadline.setdefault(last_batch, []), group)
        else:
            self._running_by_deadline[last_batch] += 1

    def discard(self, group: int) -> None:
        """Remove a group, if it is there."""
        candidate = self._candidates.pop(group, None)
        if candidate is None:
            return
        deadline = candidate.last_batch
        _decrease(self._due, deadline)
        _delete(self._ready if candidate.ready else self._running, group)
        if candidate.ready:
            _delete(self._ready_by_deadline[deadline], group)
            if not self._ready_by_deadline[deadline]:
                del self._ready_by_deadline[deadline]
        else:
            _decrease(self._running_by_deadline, deadline)

    def late(self, batch: int) -> list[int]:
        """Return the ready groups that neither this batch nor a later one may train."""
        return sorted(chain.from_iterable(groups for last, groups in self._ready_by_deadline.items() if last < batch))

    def choose(self, batch: int) -> list[int] | None:
        """Choose the groups of batch number `batch`, or wait.

        Returns:
            Numbers of the groups in order of dispatch; None to wait for groups under way. It never waits unless one is under
            way whose finish (or end by its deadline) changes the answer.
        """
        if len(self._ready) < self._size:
            return None
        first_in = self._ready[: self._size]
        if not self._overloaded(first_in, batch):
            return None if self._overtakes(first_in) else first_in
        most_urgent = sorted(islice(self._by_urgency(batch), self._size))
        too_many = self._overloaded(most_urgent, batch)
        if not too_many:
            return None if self._overtakes(most_urgent) else most_urgent
        if self._running and min(self._running_by_deadline) <= max(too_many):
            return None
        return most_urgent

    def _by_urgency(self, batch: int) -> Iterator[int]:
        """Yield the ready groups, those first that are due first; of these the older ones first."""
        deadlines = sorted(self._ready_by_deadline)
        now = bisect.bisect(deadlines, batch) if self._late_is_due else 0
        yield from heapq.merge(*(self._ready_by_deadline[each] for each in deadlines[:now]))
        for each in deadlines[now:]:
            yield from self._ready_by_deadline[each]

    def _overloaded(self, picked: Sequence[int], batch: int) -> list[int]:
        """Return the deadlines by which more groups are due than the batches until then can hold, if `picked` is this batch."""
        taken = Counter(self._candidates[group].last_batch for group in picked)
        found, due = [], 0
        for last in sorted(self._due):
            more = self._due[last] - taken[last]
            due += more
            deadline = max(last, batch) if self._late_is_due else last
            # The i-th most urgent of the rest needs ceil(i / size) further batches.
            if more and deadline < batch + 1 + (due - 1) // self._size:
                found.append(deadline)
        return found

    def _overtakes(self, picked: Sequence[int]) -> bool:
        """Return whether more younger groups would pass the oldest unfinished one than the window allows."""
        if not self._running:
            return False
        oldest = self._candidates[self._running[0]]
        younger = len(picked) - bisect.bisect(picked, oldest.group)
        return younger > 0 and oldest.passed + younger > self._window - 1


def _decrease(counts: Counter[int], key: int) -> None:
    """Count one less, and forget a key at 0: whoever iterates reads few keys."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _delete(numbers: list[int], number: int) -> None:
    del numbers[bisect.bisect_left(numbers, number)]
