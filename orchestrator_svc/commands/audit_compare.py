"""Exactly once, proven from both sides: compare what the orchestrator's journal says with what the trainer recorded.

Pure: facts and records in, counts and differences out. It folds the facts by itself, not through the ledger that the
orchestrator runs on, so that a defect there shows as a difference too. If it finds no difference, this is proven:

* every accepted trajectory is trained once by the live weights, or dropped once under a counted reason, or still in flight;
* the trainer trained nothing else, and each trajectory exactly as the journal's batch holds it, by digest;
* neither side lacks a fact or a batch, or has one twice.

The live weights are the newest version that the newest epoch descends from. Batches that an older epoch applied after the version that the
next epoch began from were rolled back. They are compared, too, and counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sluice.digests import batch_digest
from sluice.v1 import checkpoint_pb2, journal_pb2, tokens_pb2
from sluice.versions import ENDLESS, Lineage, Version

JOURNAL = "journal"
RECORD = "record"
CHECKPOINT = "checkpoint"
PAYLOADS = "payloads"
REPORT = "report"

FIRST_MIGRATED = 1 << 32
"""Number of the first fact of a journal that was migrated from a format without facts."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between files of the run.

    Attributes:
        side: Which files are wrong, as far as can be told: "journal", "record", "checkpoint", "payloads" or "report".
        problem: What is wrong, as one sentence.
        batch: Id of the batch, or empty.
        trajectory: Id of the trajectory, or empty.
    """

    side: str
    problem: str
    batch: str = ""
    trajectory: str = ""


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What became of every trajectory.

    Attributes:
        accepted: Trajectories that the journal accepted.
        trained: Trajectories that the live weights were trained with, according to both sides.
        dropped: Trajectories that were not trained, by reason, according to both sides.
        unheard: Trajectories in `unheard_batches`.
        in_flight: Trajectories that wait for a batch, or are in a batch that the live weights lack.
        rolled_back: Trajectories in batches that were applied and that a later epoch took back.
        trained_again: Rolled-back trajectories that the live weights were trained with all the same.
        unheard_batches: Batches that the trainer applied and the journal does not know as applied: it was killed before.
        batches: Batches that the live weights were trained with.
        version: Version of the live weights.
        counted_batches: Batches from before a migration of the journal, whose trajectories are only counted.
        groups_in_flight: Accepted groups whose trajectories are in flight.
        facts: Number of facts.
    """

    accepted: int
    trained: int
    dropped: Mapping[str, int]
    unheard: int
    in_flight: int
    rolled_back: int
    trained_again: int
    unheard_batches: tuple[str, ...]
    batches: int
    counted_batches: int
    version: Version
    groups_in_flight: frozenset[int]
    facts: int
    differences: tuple[Difference, ...]


def audit(
    facts: Iterable[tuple[int, journal_pb2.Fact]],
    records: Iterable[checkpoint_pb2.BatchRecord],
    lineage: Lineage,
    checkpoints: Iterable[checkpoint_pb2.CheckpointManifest] = (),
) -> AuditResult:
    """Compare a journal with a trainer's record.

    Args:
        facts: All facts of the journal with their numbers, in order.
        records: All batches of the trainer's record, in order.
        lineage: Where each epoch began, as the trainer knows it.
        checkpoints: The complete checkpoints: each names a position of the journal, and batches that the record must have.
    """
    journal = _Journal()
    for seq, fact in facts:
        journal.take_fact(seq, fact)
    record = _Record(journal.differences, records)
    return _Comparison(journal, record, lineage).result(checkpoints)


# The journal's side.


@dataclass(slots=True)
class _Group:
    """A group according to the facts. Once it is in a batch, its trajectories are in the batch only."""

    attempt: int
    trajectories: list[str] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    accepted: bool = False
    dropped: str = ""
    batch: int = 0


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch as it was made.

    Attributes:
        digests: Digest of each trajectory, in order; empty if the process that made the batch did not know them.
    """

    batch_id: str
    groups: tuple[int, ...]
    trajectories: tuple[str, ...]
    digests: tuple[bytes, ...]

    @property
    def content_digest(self) -> str:
        return batch_digest(self.digests)


@dataclass(frozen=True, slots=True)
class _Applied:
    """A batch as it was applied, according to the journal: the reason for each trajectory that was not trained. All others were trained."""

    batch: _Batch
    dropped: Mapping[str, str]


class _Journal:
    """Folds the facts, and notes what no orchestrator would have written."""

    def __init__(self) -> None:
        self.differences: list[Difference] = []
        self.last_seq = 0
        self.accepted: dict[str, int] = {}
        self.groups: dict[int, _Group] = {}
        self.batches: dict[int, _Batch] = {}
        self.made: dict[int, list[_Batch]] = {}
        self.applied: dict[Version, _Applied] = {}
        self.dropped: Counter[str] = Counter()
        self.allotted: set[int] = set()
        self.lineage = Lineage()
        self.imported: dict[int, journal_pb2.ImportedBatch] = {}
        self.imported_accepted = self.imported_until = 0
        # Other kinds of facts do not affect what is trained.
        self._takes: dict[str, Callable[[journal_pb2.Fact], None]] = {
            "task_drawn": lambda fact: self._drawn(fact.task_drawn),
            "episodes_ended": lambda fact: self._episodes_ended(fact.episodes_ended),
            "group_accepted": lambda fact: self._group_accepted(fact.group_accepted.group),
            "group_dropped": lambda fact: self._group_dropped(fact.group_dropped),
            "trajectories_set_aside": lambda fact: self._set_aside(fact.trajectories_set_aside),
            "batch_made": lambda fact: self._batch_made(fact.batch_made),
            "batch_sent": lambda fact: self._batch_sent(fact.batch_sent),
            "batch_applied": lambda fact: self._batch_applied(fact.batch_applied),
            "batch_unmade": lambda fact: self._batch_unmade(fact.batch_unmade.sequence_no),
            "epoch_allotted": lambda fact: self.allotted.add(fact.epoch_allotted.epoch),
            "epoch_begun": lambda fact: self._epoch_begun(fact.epoch_begun),
            "history_imported": lambda fact: self._history_imported(fact.history_imported),
        }

    def take_fact(self, seq: int, fact: journal_pb2.Fact) -> None:
        """Take the next fact."""
        if seq <= self.last_seq:
            self._wrong(f"fact {seq} stands after fact {self.last_seq}")
        elif not self.last_seq and seq == FIRST_MIGRATED:
            pass
        elif seq > self.last_seq + 1:
            missing = (
                f"fact {seq - 1} is" if seq == self.last_seq + 2 else f"facts {self.last_seq + 1} to {seq - 1} are"
            )
            self._wrong(f"{missing} missing")
        self.last_seq = max(seq, self.last_seq)
        kind = fact.WhichOneof("kind")
        if kind is None:
            self._wrong(f"fact {seq} has no kind that this release knows")
        elif (take := self._takes.get(kind)) is not None:
            take(fact)

    def _drawn(self, fact: journal_pb2.TaskDrawn) -> None:
        before = self.groups.get(fact.group)
        if before is not None and (before.accepted or before.dropped or fact.attempt <= before.attempt):
            self._wrong(f"group {fact.group} was drawn again as attempt {fact.attempt} although it had ended or begun")
            return
        self.groups[fact.group] = _Group(fact.attempt)

    def _episodes_ended(self, fact: journal_pb2.EpisodesEnded) -> None:
        group = self.groups.get(fact.group)
        if group is None:
            self._wrong(f"episodes of group {fact.group} ended, which was never drawn")
            return
        if fact.attempt < group.attempt or group.accepted or group.dropped:
            self._wrong(f"episodes of attempt {fact.attempt} of group {fact.group} ended, which was over")
            return
        ended = Counter((each.episode, each.reason) for each in fact.episodes)  # one entry for each reason
        for (number, _), times in ended.items():
            if number in group.ended or times > 1:
                self._wrong(f"episode {number} of group {fact.group} ended twice")
        group.ended.update(each.episode for each in fact.episodes)
        for episode in fact.episodes:
            group.trajectories += [each.trajectory_id for each in episode.trajectories]
            for name in episode.untrainable:
                self._accept(fact.group, [name])
                self.dropped[episode.reason] += 1

    def _group_accepted(self, number: int) -> None:
        group = self.groups.get(number)
        if group is None or group.accepted or group.dropped:
            state = "never drawn" if group is None else "accepted before" if group.accepted else "dropped before"
            self._wrong(f"group {number} was accepted, but it was {state}")
            return
        group.accepted = True
        if not group.trajectories:
            self._wrong(f"group {number} was accepted without a trajectory")
        self._accept(number, group.trajectories)

    def _accept(self, number: int, trajectories: Iterable[str]) -> None:
        for name in trajectories:
            if name in self.accepted:
                self._wrong(f"accepted in group {number}, and in group {self.accepted[name]} before", trajectory=name)
            self.accepted[name] = number

    def _group_dropped(self, fact: journal_pb2.GroupDropped) -> None:
        group = self.groups.get(fact.group)
        if group is None or group.dropped or group.batch:
            state = f"in batch {group.batch}" if group and group.batch else "never drawn or dropped before"
            self._wrong(f"group {fact.group} was dropped as {fact.reason}, but it was {state}")
            return
        if not group.accepted:  # its episodes may still have produced trajectories
            self._accept(fact.group, group.trajectories)
        if fact.trajectories != len(group.trajectories):
            self._wrong(
                f"group {fact.group} was dropped as {fact.reason} with {fact.trajectories} trajectories, but it had"
                f" {len(group.trajectories)}"
            )
        self.dropped[fact.reason] += len(group.trajectories)
        group.dropped, group.trajectories = fact.reason, []

    def _set_aside(self, fact: journal_pb2.TrajectoriesSetAside) -> None:
        group = self.groups.get(fact.group)
        if group is None or not group.accepted or group.dropped or group.batch:
            self._wrong(f"trajectories of group {fact.group} were set aside, but it was not complete, or in a batch")
            return
        for name in fact.trajectory_ids:
            if name not in group.trajectories:
                self._wrong(f"set aside in group {fact.group}, which lacks it", trajectory=name)
                continue
            group.trajectories.remove(name)
            self.dropped[fact.reason] += 1
        if not group.trajectories:
            group.dropped = fact.reason

    def _batch_made(self, fact: journal_pb2.BatchMade) -> None:
        number, name = fact.sequence_no, fact.batch_id
        if number in self.batches:
            self._wrong(f"batch {number} was made twice", batch=name)
            return
        batch = _Batch(name, tuple(fact.groups), tuple(fact.trajectory_ids), tuple(fact.trajectory_digests))
        expected: list[str] = []
        for each in batch.groups:
            group = self.groups.get(each)
            if group is None or not group.accepted or group.dropped or group.batch:
                self._wrong(f"the batch holds group {each}, which was not free for it", batch=name)
                continue
            expected += group.trajectories
            group.batch, group.trajectories = number, []  # the batch has them from here on
        for trajectory, count in (Counter(batch.trajectories) - Counter(expected)).items():
            self._wrong(f"the batch has it {count} times more than its groups", batch=name, trajectory=trajectory)
        for trajectory in Counter(expected) - Counter(batch.trajectories):
            self._wrong("its group is in the batch, it is not", batch=name, trajectory=trajectory)
        if batch.digests and len(batch.digests) != len(batch.trajectories):
            self._wrong("the batch has not one digest for each trajectory", batch=name)
        if (batch.digests or fact.content_digest) and batch.content_digest != fact.content_digest:
            self._wrong("the digest of the batch is not that of its trajectories", batch=name)
        self.batches[number] = batch
        self.made.setdefault(number, []).append(batch)

    def _batch_sent(self, fact: journal_pb2.BatchSent) -> None:
        if fact.sequence_no not in self.batches:
            self._wrong(f"batch {fact.sequence_no} was sent in epoch {fact.epoch}, but it was not made or was unmade")

    def _batch_applied(self, fact: journal_pb2.BatchApplied) -> None:
        batch, version = self.batches.get(fact.sequence_no), Version.from_proto(fact.policy_version)
        if batch is None:
            self._wrong(f"batch {fact.sequence_no} was applied as version {version}, but it was not made or was unmade")
            return
        if version.number != fact.sequence_no or version in self.applied:
            problem = "a second time" if version in self.applied else f"although it is batch {fact.sequence_no}"
            self._wrong(f"the batch was applied as version {version} {problem}", batch=batch.batch_id)
            return
        dropped = {name: reason for reason, each in fact.dropped.items() for name in each.trajectory_ids}
        told = Counter([*fact.trained, *(name for each in fact.dropped.values() for name in each.trajectory_ids)])
        for name, times in told.items():
            if times > 1:
                self._wrong("its outcome is noted twice", batch=batch.batch_id, trajectory=name)
        for name in told.keys() ^ set(batch.trajectories):
            problem = "its outcome is noted, but the batch lacks it" if name in told else "its outcome is not noted"
            self._wrong(problem, batch=batch.batch_id, trajectory=name)
        self.applied[version] = _Applied(batch, dropped)

    def _batch_unmade(self, number: int) -> None:
        batch = self.batches.pop(number, None)
        if batch is None:
            self._wrong(f"batch {number} was unmade, but it was not made or was unmade before")
            return
        for name in batch.trajectories:
            if (group := self.groups.get(self.accepted.get(name, 0))) is not None:
                group.trajectories.append(name)
                group.batch = 0

    def _epoch_begun(self, fact: journal_pb2.EpochBegun) -> None:
        origin = Version.from_proto(fact.origin)
        if fact.epoch not in self.allotted:
            self._wrong(f"epoch {fact.epoch} was begun, but its number was never given away")
        if origin.epoch >= fact.epoch or fact.epoch in self.lineage.origins:
            self._wrong(f"epoch {fact.epoch} was begun from version {origin}, which cannot be")
            return
        self.lineage = self.lineage.begin(fact.epoch, origin)
        self.imported = {number: each for number, each in self.imported.items() if number <= origin.number}

    def _history_imported(self, fact: journal_pb2.HistoryImported) -> None:
        self.imported_accepted = fact.accepted
        self.dropped.update(fact.dropped)
        for each in fact.batches:
            self.imported_until = max(self.imported_until, each.sequence_no)
            if each.applied:
                self.imported[each.sequence_no] = each
            if each.groups or not each.applied:
                batch = _Batch(each.batch_id, tuple(each.groups), tuple(each.trajectory_ids), ())
                self.batches[each.sequence_no] = batch
                self.made[each.sequence_no] = [batch]
            for number in each.groups:
                if (group := self.groups.get(number)) is not None:
                    group.batch, group.trajectories = each.sequence_no, []

    def _wrong(self, problem: str, *, batch: str = "", trajectory: str = "") -> None:
        self.differences.append(Difference(JOURNAL, problem, batch, trajectory))


# The trainer's side.


class _Record:
    """The batches of the trainer's record by version, and what no trainer would have written."""

    def __init__(self, differences: list[Difference], records: Iterable[checkpoint_pb2.BatchRecord]) -> None:
        self.batches: dict[Version, checkpoint_pb2.BatchRecord] = {}
        for each in records:
            version = Version.from_proto(each.policy_version)
            if version in self.batches:
                differences.append(Difference(RECORD, f"version {version} is recorded twice", each.batch_id))
                continue
            self.batches[version] = each
            if version.number != each.sequence_no:
                problem = f"batch {each.sequence_no} is recorded as version {version}"
                differences.append(Difference(RECORD, problem, each.batch_id))
            for name, times in Counter(result.trajectory_id for result in each.results).items():
                if times > 1:
                    differences.append(Difference(RECORD, f"it is recorded {times} times", each.batch_id, name))
            digests = [result.digest for result in each.results]
            if any(digests) and batch_digest(digests) != each.content_digest:
                problem = "the digest of the batch is not that of its trajectories"
                differences.append(Difference(RECORD, problem, each.batch_id))


# Both sides.


class _Comparison:
    """Compares the two sides, version by version."""

    def __init__(self, journal: _Journal, record: _Record, lineage: Lineage) -> None:
        self._journal, self._record = journal, record
        self._differences = journal.differences
        for epoch in journal.lineage.origins.keys() & lineage.origins.keys():
            one, other = journal.lineage.origins[epoch], lineage.origins[epoch]
            if one != other:
                self._wrong(JOURNAL, f"epoch {epoch} began from version {one}, for the trainer from {other}")
        for epoch in sorted(lineage.origins.keys() - journal.allotted):
            self._wrong(JOURNAL, f"the trainer began epoch {epoch}, whose number the journal never gave away")
        self._lineage = lineage.merged(journal.lineage)
        self._end_of_line = Version(self._lineage.newest_epoch, ENDLESS)

    def result(self, checkpoints: Iterable[checkpoint_pb2.CheckpointManifest]) -> AuditResult:
        """Compare, and count what became of every trajectory."""
        journal, record = self._journal, self._record
        for version in sorted(journal.applied.keys() - record.batches.keys()):
            problem = f"the journal has it applied as version {version}, the record lacks it"
            self._wrong(RECORD, problem, journal.applied[version].batch.batch_id)
        for version, each in sorted(record.batches.items(), key=lambda item: item[0]):
            self._compare(version, each)
        self._check_gaps()
        self._check_checkpoints(checkpoints)
        live = {version for version in journal.applied if self._is_live(version)}
        unheard = sorted(v for v in record.batches.keys() - journal.applied.keys() if self._is_live(v))
        trained: Counter[str] = Counter()
        dropped = Counter(journal.dropped)
        for version in live:
            applied = journal.applied[version]
            dropped.update(applied.dropped.values())
            trained.update(name for name in applied.batch.trajectories if name not in applied.dropped)
        for name, times in trained.items():
            if times > 1:
                self._wrong(JOURNAL, f"it was trained {times} times by the live weights", trajectory=name)
        unheard = [version for version in unheard if version.number not in journal.imported]
        for counted in journal.imported.values():
            dropped.update(counted.dropped)
        done = {version.number for version in (*live, *unheard)} | journal.imported.keys()
        waiting = [number for number in journal.batches if number not in done]
        free = {
            number: each
            for number, each in journal.groups.items()
            if each.accepted and not (each.dropped or each.batch)
        }
        in_flight = sum(len(each.trajectories) for each in free.values())
        in_flight += sum(len(journal.batches[number].trajectories) for number in waiting)
        rolled_back = {
            name
            for version, applied in journal.applied.items()
            if not self._is_live(version)
            for name in applied.batch.trajectories
        }
        unheard_count = sum(len(record.batches[version].results) for version in unheard)
        accepted = len(journal.accepted) + journal.imported_accepted
        trained_count = trained.total() + sum(each.trained for each in journal.imported.values())
        total = trained_count + dropped.total() + in_flight + unheard_count
        if total != accepted:
            self._wrong(JOURNAL, f"{accepted} trajectories were accepted, but {total} are accounted for")
        return AuditResult(
            accepted=accepted,
            trained=trained_count,
            dropped={reason: count for reason, count in sorted(dropped.items()) if count},
            unheard=unheard_count,
            in_flight=in_flight,
            rolled_back=len(rolled_back),
            trained_again=sum(name in trained for name in rolled_back),
            unheard_batches=tuple(record.batches[version].batch_id for version in unheard),
            batches=len(done),
            counted_batches=len(journal.imported),
            version=max((*live, *unheard), default=Version(self._lineage.newest_epoch, 0)),
            groups_in_flight=frozenset(free) | {each for number in waiting for each in journal.batches[number].groups},
            facts=journal.last_seq,
            differences=tuple(self._differences),
        )

    def _is_live(self, version: Version) -> bool:
        return not self._lineage.is_retired(version, self._end_of_line)

    def _compare(self, version: Version, record: checkpoint_pb2.BatchRecord) -> None:
        """Compare one recorded batch with the same batch in the journal: as it was applied, or else as it was made."""
        applied, made = self._journal.applied.get(version), self._journal.made.get(version.number, [])
        batch = applied.batch if applied is not None else _most_like(record, made)
        if version.number <= self._journal.imported_until and applied is None:
            self._compare_counts(version, record)
            return
        if batch is None or batch.batch_id != record.batch_id:
            self._wrong(RECORD, f"recorded as version {version}, but the journal made no such batch", record.batch_id)
            return
        self._compare_content(version, batch, record)
        if applied is not None:
            self._compare_outcomes(applied, record)

    def _compare_counts(self, version: Version, record: checkpoint_pb2.BatchRecord) -> None:
        """Compare a batch from before the migration. The journal has only counts for it."""
        counted = self._journal.imported.get(version.number)
        if counted is None or not self._is_live(version):
            return
        trained = sum(each.outcome == tokens_pb2.TRAJECTORY_OUTCOME_TRAINED for each in record.results)
        if trained != counted.trained:
            problem = f"the journal counts {counted.trained} trained trajectories, the record {trained}"
            self._wrong(RECORD, problem, record.batch_id)

    def _compare_content(self, version: Version, batch: _Batch, record: checkpoint_pb2.BatchRecord) -> None:
        names = [result.trajectory_id for result in record.results]
        for name in Counter(batch.trajectories) - Counter(names):
            self._wrong(
                RECORD, f"the journal's batch has it, version {version} of the record lacks it", batch.batch_id, name
            )
        for name in Counter(names) - Counter(batch.trajectories):
            self._wrong(
                RECORD, f"version {version} of the record has it, the journal's batch lacks it", batch.batch_id, name
            )
        if sorted(names) == sorted(batch.trajectories) and tuple(names) != batch.trajectories:
            self._wrong(RECORD, "the trajectories stand in another order", batch.batch_id)
        digests = {result.trajectory_id: result.digest for result in record.results}
        for name, digest in zip(batch.trajectories, batch.digests, strict=False):
            if digests.get(name, digest) != digest:
                self._wrong(
                    RECORD,
                    f"the journal sent {digest.hex()}, the trainer recorded {digests[name].hex() or 'no digest'}",
                    batch.batch_id,
                    name,
                )

    def _compare_outcomes(self, applied: _Applied, record: checkpoint_pb2.BatchRecord) -> None:
        for result in record.results:
            if result.outcome == tokens_pb2.TRAJECTORY_OUTCOME_TRAINED:
                recorded = "trained"
            else:
                recorded = f"dropped as {result.reason}"
            noted = applied.dropped.get(result.trajectory_id)
            noted = "trained" if noted is None else f"dropped as {noted}"
            if noted != recorded:
                problem = f"the journal has it {noted}, the record {recorded}"
                self._wrong(RECORD, problem, record.batch_id, result.trajectory_id)

    def _check_gaps(self) -> None:
        """Check that each side has the first batches of an epoch without a gap: reports arrive and are recorded in order."""
        heard = {
            version.number for version in self._journal.applied if self._is_live(version)
        } | self._journal.imported.keys()
        for number in sorted(set(range(1, max(heard, default=0))) - heard):
            self._wrong(JOURNAL, f"batch {number} of the live weights was not noted as applied, later ones were")
        last = {epoch: origin.number for epoch, origin in self._lineage.origins.items()}
        until = dict(last)  # the number that each epoch must at least have reached
        for version in self._record.batches:
            until[version.epoch] = max(until.get(version.epoch, 0), version.number)
        for origin in self._lineage.origins.values():
            until[origin.epoch] = max(until.get(origin.epoch, 0), origin.number)
        for epoch in sorted(until):
            for number in range(max(last.get(epoch, 0), self._journal.imported_until) + 1, until[epoch] + 1):
                version = Version(epoch, number)
                if not (version in self._record.batches or version in self._journal.applied):
                    self._wrong(
                        RECORD, f"version {version} was made, for later ones build upon it; the record lacks it"
                    )

    def _check_checkpoints(self, checkpoints: Iterable[checkpoint_pb2.CheckpointManifest]) -> None:
        for manifest in checkpoints:
            saved = manifest.checkpoint
            version = Version.from_proto(saved.policy_version)
            held = self._record.batches.get(version)
            if version.number > self._journal.imported_until and held is None:
                self._wrong(RECORD, f"{saved.name} holds version {version}, the record lacks it", saved.last_batch_id)
            elif held is not None and saved.last_batch_id != held.batch_id:
                self._wrong(CHECKPOINT, f"{saved.name} names another last batch than the record", saved.last_batch_id)
            if saved.journal_position > self._journal.last_seq:
                problem = (
                    f"{saved.name} names fact {saved.journal_position}, the journal ends at {self._journal.last_seq}"
                )
                self._wrong(JOURNAL, problem)

    def _wrong(self, side: str, problem: str, batch: str = "", trajectory: str = "") -> None:
        self._differences.append(Difference(side, problem, batch, trajectory))


def _most_like(record: checkpoint_pb2.BatchRecord, made: Sequence[_Batch]) -> _Batch | None:
    """Return which of the batches made under its number was recorded: the one with its name, else one with its trajectories, else the last.

    A batch that was unmade and made again may hold the same trajectories under another name.
    """
    names = tuple(result.trajectory_id for result in record.results)
    return max(
        reversed(made), key=lambda each: (each.batch_id == record.batch_id, each.trajectories == names), default=None
    )
