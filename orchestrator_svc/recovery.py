"""What a start reads from the tables of the journal: the tasks, groups, batches and counts of earlier processes."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass, field

from orchestrator_svc.scheduler import Accounting, Batch, DrawnTask, Group, Stage
from sluice.versions import Version


class JournalError(Exception):
    """The journal cannot be used; the message says what to do."""


class GroupDamagedError(JournalError):
    """What was written of one group cannot be read any more; the rest of the journal can be used."""


@dataclass
class Recovery:
    """What earlier processes of a run left behind.

    Attributes:
        epochs: Epochs that trainers began, with the version each began from, ascending.
        ready: Groups that are in no batch.
        batches: Batches that were made and not pruned, with their groups, ascending; applied ones included.
        next_group: Number of the next group.
        next_position: Next place in the stream of tasks.
        generated: What earlier processes generated, as `PolicyEngine.counts` names it.
        elapsed_s: Seconds that earlier processes of the run lasted.
    """

    epochs: list[tuple[int, Version]] = field(default_factory=list)
    drawn: list[DrawnTask] = field(default_factory=list)
    ready: list[Group] = field(default_factory=list)
    batches: list[tuple[Batch, list[Group]]] = field(default_factory=list)
    next_group: int = 1
    next_position: int = 0
    accounting: Accounting = field(default_factory=Accounting)
    generated: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0

    @property
    def present_epoch(self) -> int:
        """The epoch that a trainer began last; 0 if none did."""
        return self.epochs[-1][0] if self.epochs else 0

    @property
    def applied(self) -> int:
        """The last batch that is known to be applied in the present epoch."""
        origin = self.epochs[-1][1].number if self.epochs else 0
        return max([origin, *self.accounting.applied_batches()])

    def unreported(self, number: int) -> list[Batch]:
        """Return the batches that weights at version `number` hold and whose outcome the journal does not know."""
        applied = set(self.accounting.applied_batches())
        return [batch for batch, _ in self.batches if batch.sequence_no <= number and batch.sequence_no not in applied]

    def after(self, number: int) -> list[tuple[Batch, list[Group]]]:
        """Return the batches that weights at version `number` lack.

        Raises:
            JournalError: if the first of them was pruned.
        """
        lacking = [pair for pair in self.batches if pair[0].sequence_no > number]
        pruned = not lacking or lacking[0][0].sequence_no != number + 1
        if pruned and max(self.accounting.applied_batches(), default=0) > number:
            raise JournalError(
                f"the trainer restored version {number}, but the journal no longer holds batch {number + 1}:"
                " put the newer checkpoint back, or begin a new run (--run NAME)"
            )
        return lacking


def read_tables(connection: sqlite3.Connection) -> Recovery:
    """Read what earlier processes of the run left behind."""
    run = connection.execute
    meta = dict(run("SELECT key, value FROM meta"))
    sizes = dict(run("SELECT number, COUNT(*) FROM trajectories GROUP BY number"))
    groups = {
        number: Group(number, position, _versions(versions), Stage.READY, sizes.get(number, 0))
        for number, position, versions in run(
            "SELECT number, position, versions FROM groups WHERE stage = 'accepted' ORDER BY number"
        )
    }
    members: dict[int, list[int]] = {}
    for sequence_no, number in run("SELECT sequence_no, number FROM batch_groups ORDER BY number"):
        members.setdefault(sequence_no, []).append(number)
    # A group that is gone was damaged: `Batch.groups` still names it, which shows that the batch is not whole.
    batches = [
        (
            Batch(sequence_no, batch_id, tuple(members[sequence_no])),
            [groups[each] for each in members[sequence_no] if each in groups],
        )
        for sequence_no, batch_id in run("SELECT sequence_no, batch_id FROM batches ORDER BY sequence_no")
        if sequence_no in members
    ]
    batched = {number for numbers in members.values() for number in numbers}
    epochs = run("SELECT epoch, origin FROM epochs WHERE origin IS NOT NULL ORDER BY epoch")
    drawn = run("SELECT number, position FROM groups WHERE stage = 'drawn' ORDER BY number")
    return Recovery(
        epochs=[(epoch, Version.parse(origin)) for epoch, origin in epochs],
        drawn=[DrawnTask(number, position) for number, position in drawn],
        ready=[group for number, group in groups.items() if number not in batched],
        batches=batches,
        next_group=int(meta.get("next_group", "1")),
        next_position=int(meta.get("next_position", "0")),
        accounting=_accounting(connection),
        generated=Counter(dict(run("SELECT reason, amount FROM counts WHERE kind = 'generated'"))),
        elapsed_s=float(meta.get("elapsed_s", "0")),
    )


def _accounting(connection: sqlite3.Connection) -> Accounting:
    accounting = Accounting()
    for kind, reason, amount in connection.execute("SELECT kind, reason, amount FROM counts"):
        if kind == "accepted":
            accounting.accept(amount)
        elif kind == "dropped":
            accounting.drop(reason, amount)
        elif kind == "failed":
            accounting.failed_groups[reason] += amount
    drops: dict[int, Counter[str]] = {}
    for sequence_no, reason, amount in connection.execute("SELECT * FROM batch_drops"):
        drops.setdefault(sequence_no, Counter())[reason] = amount
    for sequence_no, trained in connection.execute("SELECT sequence_no, trained FROM batches WHERE applied = 1"):
        accounting.apply(sequence_no, trained, drops.get(sequence_no, {}))
    return accounting


def _versions(text: str) -> tuple[Version, ...]:
    return tuple(Version.parse(part) for part in text.split(",") if part)
