"""Where a run stands on disk: its checkpoints, its epochs, and which checkpoint an epoch goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice.config import CommonConfig
from sluice.rpc import SluiceError
from sluice.v1 import checkpoint_pb2
from sluice.v1.trainer_pb2 import Checkpoint
from sluice.versions import BASE, Version
from trainer_svc.checkpoint.checkpoints import Checkpoints
from trainer_svc.checkpoint.lineage import Lineage, LineageFile, from_proto, to_proto
from trainer_svc.checkpoint.manifest import CheckpointDamagedError
from trainer_svc.checkpoint.saver import Saver
from trainer_svc.checkpoint.state import Trained
from trainer_svc.service.admission import Known

__all__ = ["History", "Restored", "origin_of"]

_BEYOND = (1 << 63) - 1
"""A version number after every other of its epoch."""


@dataclass(frozen=True, slots=True)
class Restored:
    """Where an epoch begins.

    Attributes:
        version: Version from which training goes on.
        origin: Version that the restored checkpoint was written at; (0, 0) for the base model.
        last_batch_id: Last batch that the weights hold; empty for the base model.
        held: The newest batches that the weights hold, oldest first, as far as the record on disk has them.
    """

    version: Version
    origin: Version
    last_batch_id: str
    held: tuple[checkpoint_pb2.BatchRecord, ...] = ()

    @property
    def known(self) -> dict[str, Known]:
        """The batches whose repeats are recognised, by id."""
        last = {self.last_batch_id: Known(self.version.number)} if self.last_batch_id else {}
        return last | {each.batch_id: Known(each.sequence_no, each.content_digest) for each in self.held}


class History:
    """The checkpoints and the epochs of one run. Everything here blocks.

    Args:
        common: The run's settings.
        keep: Complete checkpoints that stay.
        saver: Writes and reads checkpoints.
    """

    def __init__(self, common: CommonConfig, keep: int, saver: Saver) -> None:
        self.run = common.run
        self.checkpoints = Checkpoints(common.run_dir / "checkpoints", keep, saver)
        self.lineage = Lineage()
        self._file = LineageFile(common.run_dir / "trainer" / "epochs.binpb")

    def read(self) -> None:
        """Read the epochs that the run's file and its checkpoints know; the checkpoints may have been moved here alone.

        Raises:
            SluiceError: DATA_LOSS if the file is damaged.
        """
        lineage = Lineage()
        for manifest in self.checkpoints.complete():
            lineage = lineage.merged(from_proto(manifest.lineage))
        self.lineage = lineage.merged(self._file.read())

    def begin(self, epoch: int, origin: Version, *, write: bool) -> None:
        """Add an epoch, and write it down where this process is the one that does."""
        self.lineage = self.lineage.begin(epoch, origin)
        if write:
            self._file.write(self.lineage)

    def choose(self, name: str) -> checkpoint_pb2.CheckpointManifest | None:
        """The checkpoint to restore.

        Args:
            name: Its name; empty for the newest one.

        Returns:
            None for the base model: no name is given, and there is no checkpoint.

        Raises:
            SluiceError: NOT_FOUND if there is none of this name, UNAVAILABLE if one is being written for too long.
        """
        try:
            self.checkpoints.saver.wait()  # it may be the one to restore
        except TimeoutError as error:
            raise SluiceError.unavailable("CHECKPOINT_DEADLINE", str(error), retry_after_s=60.0) from error
        manifest = self.checkpoints.find(name) if name else self.newest()
        if manifest is None and name:
            names = ", ".join(each.checkpoint.name for each in self.checkpoints.complete()) or "none"
            raise SluiceError.not_found(
                "NO_CHECKPOINT", f"there is no complete checkpoint {name!r}; there are: {names}"
            )
        return manifest

    def newest(self) -> checkpoint_pb2.CheckpointManifest | None:
        """The newest complete checkpoint on the line of the newest epoch: what an operator rolled back stays behind."""
        end_of_line = Version(self.lineage.newest_epoch, _BEYOND)
        return next(
            (each for each in self.checkpoints.complete() if not self.lineage.is_retired(origin_of(each), end_of_line)),
            None,
        )

    def restore(self, manifest: checkpoint_pb2.CheckpointManifest, engines: Mapping[str, Trained]) -> None:
        """Put the state of a checkpoint back.

        Raises:
            SluiceError: DATA_LOSS if its files are damaged, FAILED_PRECONDITION if it is of another model.
        """
        try:
            self.checkpoints.load(manifest, engines)
        except CheckpointDamagedError as error:
            raise SluiceError.data_loss("CHECKPOINT_DAMAGED", str(error)) from error
        except ValueError as error:
            raise SluiceError.failed_precondition("OTHER_MODEL", str(error)) from error

    def written(self, version: Version, journal_position: int) -> Checkpoint | None:
        """The checkpoint of a version if there is one, with a later position of the journal noted in it.

        Raises:
            OSError: if the position cannot be noted, or the checkpoint before takes too long.
        """
        self.checkpoints.saver.wait()
        existing = self.checkpoints.find(_name(version))
        if existing is None or origin_of(existing) != version:
            return None
        return self.checkpoints.note_position(existing, journal_position).checkpoint

    def manifest(
        self,
        version: Version,
        last_batch_id: str,
        journal_position: int,
        *,
        tokenizer_digest: str,
        optimizer_steps: int,
        batch_record: checkpoint_pb2.BatchRecordPosition | None,
    ) -> checkpoint_pb2.CheckpointManifest:
        """What a checkpoint of a version says, but for its files.

        Args:
            version: The version.
            last_batch_id: Last batch that the weights hold.
            journal_position: Where the orchestrator's journal stands.
            tokenizer_digest: Which tokenizer the rows were made with.
            optimizer_steps: Optimizer steps behind the weights.
            batch_record: Where the record of applied batches ends.
        """
        return checkpoint_pb2.CheckpointManifest(
            checkpoint=Checkpoint(
                name=_name(version),
                policy_version=version.to_proto(),
                last_batch_id=last_batch_id,
                journal_position=journal_position,
            ),
            run=f"runs/{self.run}",
            tokenizer_digest=tokenizer_digest,
            optimizer_steps=optimizer_steps,
            next_sequence_no=version.number + 1,
            lineage=to_proto(self.lineage),
            batch_record=batch_record,
        )


def origin_of(manifest: checkpoint_pb2.CheckpointManifest | None) -> Version:
    """The version that a checkpoint was written at; that of the base model for none."""
    return BASE if manifest is None else Version.from_proto(manifest.checkpoint.policy_version)


def _name(version: Version) -> str:
    return f"step_{version.number}"
