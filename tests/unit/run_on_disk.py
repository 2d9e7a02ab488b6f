"""A simulated run whose facts, payloads, records and checkpoints lie in real files, written by the code of the services."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from simulated_run import MadeBatch, SimulatedRun

from orchestrator_svc.journal.store import Journal, JournalLimits
from sluice.batch_record import read_record_file, record_directory, record_paths
from sluice.v1 import checkpoint_pb2, journal_pb2, orchestrator_pb2, tokens_pb2
from sluice.versions import Version
from trainer_svc.checkpoint.batch_record import BatchRecordFiles
from trainer_svc.checkpoint.saver import describe_files, write_manifest


@dataclass
class RunOnDisk(SimulatedRun):
    """A run in a directory. One that exists there continues: both services start again, from the last batch of the record."""

    directory: Path = Path()
    journal: Journal | None = None

    def __post_init__(self) -> None:
        directory = record_directory(self.directory)
        self._record_files = BatchRecordFiles(directory)
        self.records = [record for path in record_paths(directory) for record in read_record_file(path).records]
        if not self.records:
            super().__post_init__()
            return
        assert self.journal is not None
        ledger = self.journal.ledger
        self.trajectories = {number: [] for number in range(1, ledger.next_group)}
        for record in self.records:
            digests = {each.trajectory_id: each.digest for each in record.results}
            self.batches[record.sequence_no] = MadeBatch(record.sequence_no, record.batch_id, [], digests)
            self.origin = Version.from_proto(record.policy_version)
        self.applied = self.heard = self.origin.number
        self.epoch, self.lineage = ledger.allotted, ledger.lineage
        self._begin_epoch()

    def note(self, **kind: object) -> None:
        super().note(**kind)
        assert self.journal is not None
        if "process_started" not in kind:  # the journal notes its own
            self.journal.record_fact(self.facts[-1])

    def place(self, trajectory: str) -> journal_pb2.PayloadPlace:
        assert self.journal is not None
        record = orchestrator_pb2.TrajectoryRecord(trajectory=tokens_pb2.Trajectory(trajectory_id=trajectory))
        return self.journal.keep(record)

    def record(self, record: checkpoint_pb2.BatchRecord) -> None:
        super().record(record)
        self._record_files.append(record)

    def checkpoint_is_written(self) -> None:
        before = len(self.checkpoints)
        super().checkpoint_is_written()
        for manifest in self.checkpoints[before:]:
            manifest.batch_record.CopyFrom(self._record_files.position())
            directory = self.directory / "checkpoints" / manifest.checkpoint.name
            (directory / "state").mkdir(parents=True)
            weights = directory / "state" / "weights"
            weights.write_bytes(bytes(100))
            manifest.files.extend(describe_files([weights], directory))
            write_manifest(manifest, directory)


def lived(
    directory: Path, live: Callable[[RunOnDisk], None], name: str = "test", limits: JournalLimits | None = None
) -> RunOnDisk:
    """Let a run live and end; return it."""

    async def run_to_the_end() -> RunOnDisk:
        opened = Journal(directory, {"run": name}, limits=limits)
        run = RunOnDisk(directory=directory, journal=opened)
        live(run)
        await opened.close()
        return run

    return asyncio.run(run_to_the_end())


def a_life(run: RunOnDisk) -> None:
    """Make four batches, the last two of which are rolled back and trained again, and some groups that are not trained."""
    run.group_fails()
    run.group_is_filtered()
    run.trains(2)
    run.checkpoint_is_written()
    run.trains(1)
    run.trainer_is_killed()
    run.trainer_applies()
    run.orchestrator_hears()
    run.trains(1)
    run.group_is_accepted()
    run.group_is_accepted()
    run.batch_is_made()
    run.group_is_accepted()
