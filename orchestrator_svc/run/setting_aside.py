"""Set aside what can never be trained, so that the run continues. Pause the run when so much is set aside that the rest would be biased.

Set aside as little as possible: single trajectories, else their group, or the whole batch if nothing tells which part failed. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import grpc

from orchestrator_svc.journal.facts import Reason
from orchestrator_svc.journal.ledger import Group
from orchestrator_svc.journal.records import SharedRecord
from sluice.limits import MAX_BATCH_BYTES, MAX_REPORT_BYTES, MAX_TRAJECTORIES, report_bytes
from sluice.rows_at_fault import ROWS, numbers, rows_of
from sluice.rpc import SluiceError
from sluice.v1 import journal_pb2

WINDOW = 20
"""Number of last batches over which the share is counted."""

_OF_THE_BATCH = ("trajectories", "header.trajectory_count")
"""Fields of a refusal that mean that the batch as a whole is the cause, and no single trajectory."""

_NEVER_FITS = "MESSAGE_TOO_LARGE"


class BatchRefusedError(Exception):
    """The trainer, or the channel to it, refuses a batch because of its content: it would refuse it again.

    Attributes:
        rows: Places of the trajectories that are the cause, from 0; empty if they are not known.
        problem: What is wrong, and what to do about it.
    """

    def __init__(self, rows: frozenset[int], problem: str) -> None:
        super().__init__(problem)
        self.rows, self.problem = rows, problem

    @classmethod
    def of(cls, error: SluiceError) -> BatchRefusedError | None:
        """Return the refusal that an error stands for; None if the cause is not the batch, but for example settings."""
        if error.code is not grpc.StatusCode.INVALID_ARGUMENT:
            return None
        rows = frozenset(numbers(error.metadata.get(ROWS, ""))) or rows_of(error.violations)
        if rows or error.reason == _NEVER_FITS or error.violations.keys() & set(_OF_THE_BATCH):
            return cls(rows, error.message)
        return None


Found = tuple[Group, Sequence[SharedRecord]]
"""A group with its trajectories."""


def too_large(found: Sequence[Found]) -> list[Group]:
    """Return the groups to remove so that the others fit into one batch: first those with the most trajectories, or bytes.

    Its time grows with the size of the trajectories: not for an event loop.
    """
    sizes = {
        group.number: (
            len(records),
            sum(each.trajectory_bytes for each in records),
            sum(report_bytes(each.trajectory.trajectory_id) for each in records),
        )
        for group, records in found
    }
    out: list[Group] = []
    left = [group for group, _ in found]
    for column, most in enumerate((MAX_TRAJECTORIES, MAX_BATCH_BYTES, MAX_REPORT_BYTES)):
        while left and sum(sizes[each.number][column] for each in left) > most:
            largest = max(left, key=lambda each: sizes[each.number][column])
            left.remove(largest)
            out.append(largest)
    return out


def set_aside(group: Group, reason: str, problem: str, trajectory_ids: Iterable[str] = ()) -> journal_pb2.Fact:
    """Return the fact that sets some trajectories of a group aside, by default all of them."""
    fact = journal_pb2.TrajectoriesSetAside(group=group.number, reason=reason, problem=problem)
    fact.trajectory_ids.extend(trajectory_ids or [each.trajectory_id for each in group.trajectories])
    return journal_pb2.Fact(trajectories_set_aside=fact)


def refused(found: Sequence[Found], refusal: BatchRefusedError) -> list[journal_pb2.Fact]:
    """Return the facts that set aside the trajectories that a refusal names, or all groups if it names none."""
    at_fault: list[tuple[Group, list[str]]] = []
    place = 0
    for group, records in found:
        own = [each.trajectory.trajectory_id for row, each in enumerate(records, place) if row in refusal.rows]
        place += len(records)
        at_fault.append((group, own))
    named = any(own for _, own in at_fault)
    return [
        set_aside(group, Reason.TRAINER_REFUSES, refusal.problem, own) for group, own in at_fault if own or not named
    ]


class _Counted(NamedTuple):
    """How much one batch holds, and how much was set aside while it was made."""

    made: int
    set_aside: int


class SetAsideShare:
    """Follows the facts of a run, and says when too much of it is set aside.

    Until `WINDOW` batches were made, the missing ones count as full batches, so that one odd group of the first batch does
    not stop a run.

    Args:
        most: Largest share of the trajectories that may be set aside, 0 to 1. More pauses the run.
        batch: Trajectories of a batch in which each episode has one.
    """

    def __init__(self, most: float, batch: int) -> None:
        self.most, self._batch = most, batch
        self._batches: deque[_Counted] = deque(maxlen=WINDOW)
        self._set_aside = 0
        self._problem = ""

    def apply_fact(self, fact: journal_pb2.Fact) -> None:
        """Take the next fact."""
        kind = fact.WhichOneof("kind")
        if kind == "trajectories_set_aside":
            said = fact.trajectories_set_aside
            self._set_aside += len(said.trajectory_ids)
            self._problem = f"{said.reason}: {said.problem}"
        elif kind == "batch_made":
            self._batches.append(_Counted(len(fact.batch_made.trajectory_ids), self._set_aside))
            self._set_aside = 0
        elif kind == "batch_unmade" and self._batches:
            self._set_aside += self._batches.pop().set_aside
        elif kind == "run_resumed":
            self._batches.clear()
            self._set_aside, self._problem = 0, ""

    def state(self) -> tuple[Any, ...]:
        """Return the state that the facts led to, for `restore`."""
        return [tuple(each) for each in self._batches], self._set_aside, self._problem

    def restore(self, state: tuple[Any, ...]) -> None:
        """Restore what `state` returned."""
        batches, self._set_aside, self._problem = state
        self._batches = deque((_Counted(*each) for each in batches), maxlen=WINDOW)

    @property
    def exceeded(self) -> str:
        """A message for the operator if more than the share is set aside; else empty."""
        gone = self._set_aside + sum(each.set_aside for each in self._batches)
        made = sum(each.made for each in self._batches)
        batches = len(self._batches)
        to_come = (WINDOW - batches) * max(self._batch, made // batches if batches else 0)
        if gone <= self.most * (made + gone + to_come):
            return ""
        return (
            f"{gone} trajectories were set aside in the time of the last {batches} batches, which trained {made}: more than"
            f" {self.most:.0%} of what {WINDOW} batches hold (orchestrator.max_set_aside), at last because of {self._problem}"
        )
