"""The checkpoints of one run: which are complete, which are kept, and from which one training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import structlog
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from sluice.checkpoint_files import MANIFEST, complete_checkpoints, read_manifest, wrong_size
from sluice.host_files import remove_tree
from sluice.rpc import SluiceError
from sluice.v1 import checkpoint_pb2
from sluice.versions import BASE, ENDLESS, Lineage, Version
from trainer_svc.checkpoint.saver import Export, Saver, recover, write_durably, write_manifest
from trainer_svc.checkpoint.state import LiveState
from trainer_svc.engine.engine import TrainEngine

log = structlog.get_logger(__name__)

KEPT = "kept.json"
"""File beside the checkpoints with the name of the checkpoint that is never removed."""


class Checkpoints:
    """The checkpoints and the epochs of one run. Every method blocks.

    Args:
        directory: Holds one directory per checkpoint; created when the first one is written.
        keep: Number of complete checkpoints to keep.
        saver: Writes and reads them.
        epochs: File that notes where each epoch began; None for a run that has one epoch.
    """

    def __init__(self, directory: Path, keep: int, saver: Saver, epochs: Path | None = None) -> None:
        self.directory = directory
        self.keep = keep
        self.saver = saver
        self.lineage = Lineage()
        self._epochs = epochs

    def read_lineage(self) -> None:
        """Read the epochs from the run's file and from the checkpoints, which may have been moved here without that file.

        Raises:
            SluiceError: DATA_LOSS if the file is damaged.
        """
        known = Lineage()
        for manifest in self.complete():
            known = known.merged(_lineage(manifest.lineage))
        if self._epochs is not None and self._epochs.exists():
            try:
                noted = checkpoint_pb2.EpochLineage.FromString(self._epochs.read_bytes())
            except DecodeError as error:
                raise SluiceError.data_loss(
                    "LINEAGE_DAMAGED",
                    f"{self._epochs} cannot be read: remove it; the checkpoints know the epochs that they build upon",
                ) from error
            known = known.merged(_lineage(noted))
        self.lineage = known

    def begin_epoch(self, epoch: int, origin: Version, *, write: bool) -> None:
        """Add an epoch. With `write`, also note it on disk; only one process of a run sets it."""
        self.lineage = self.lineage.begin(epoch, origin)
        if write and self._epochs is not None:
            self._epochs.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self._epochs, _lineage_message(self.lineage).SerializeToString())

    def complete(self) -> list[checkpoint_pb2.CheckpointManifest]:
        """Return the manifests of the complete checkpoints, newest version first. Only `load` verifies their content."""
        return complete_checkpoints(self.directory)

    def incomplete(self) -> dict[str, str]:
        """Return what is wrong with each directory that looks like a checkpoint but is not complete, by its name."""
        problems = {}
        for path in sorted(self.directory.glob("step_*")):
            manifest = read_manifest(path / MANIFEST)
            problem = f"it has no readable {MANIFEST}" if manifest is None else wrong_size(manifest.files, path)
            if problem:
                problems[path.name] = problem
        return problems

    def find(self, name: str) -> checkpoint_pb2.CheckpointManifest | None:
        """Return the complete checkpoint of this name."""
        return next((manifest for manifest in self.complete() if manifest.checkpoint.name == name), None)

    def to_continue_from(self) -> list[checkpoint_pb2.CheckpointManifest]:
        """Return the complete checkpoints that the newest epoch descends from, newest first: a rollback stays in effect."""
        end_of_line = Version(self.lineage.newest_epoch, ENDLESS)
        return [each for each in self.complete() if not self.lineage.is_retired(origin_of(each), end_of_line)]

    def newest(self) -> checkpoint_pb2.CheckpointManifest | None:
        """Return the first of `to_continue_from`."""
        return next(iter(self.to_continue_from()), None)

    def sweep(self) -> None:
        """Remove leftovers of interrupted writes, and warn of incomplete checkpoints. Call it while no checkpoint is being written."""
        for path in list(self.directory.glob(".step_*")):
            recover(self.directory / path.name.split(".")[1])
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
        for name, problem in self.incomplete().items():
            log.warning(
                "this is no complete checkpoint and is skipped", path=str(self.directory / name), reason=problem
            )

    def begin(
        self,
        manifest: checkpoint_pb2.CheckpointManifest,
        state: LiveState,
        export: Export | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> Future[checkpoint_pb2.CheckpointManifest]:
        """Copy the state, write it in the background, and remove surplus checkpoints.

        The manifest's version names the checkpoint. For arguments, errors and result see `Saver.begin`.
        """
        version = origin_of(manifest)
        manifest.checkpoint.name = f"step_{version.number}"
        manifest.lineage.CopyFrom(_lineage_message(self.lineage))
        target = self.directory / manifest.checkpoint.name
        return self.saver.begin(
            target, manifest, state, export=export, before=before, after=partial(self._prune, version, self.lineage)
        )

    def written(self, version: Version, journal_position: int) -> checkpoint_pb2.CheckpointManifest | None:
        """Return the checkpoint of a version, if there is one. Update its manifest if the given journal position is later than its own.

        The update notes the position and the epochs so far.

        Raises:
            OSError: if the manifest cannot be written, or the previous checkpoint takes too long.
        """
        self.saver.wait()
        existing = self.find(f"step_{version.number}")
        if existing is None or origin_of(existing) != version:
            return None
        if journal_position > existing.checkpoint.journal_position:
            existing.checkpoint.journal_position = journal_position
            existing.lineage.CopyFrom(_lineage_message(self.lineage))
            write_manifest(existing, self.directory / existing.checkpoint.name)
        return existing

    def kept(self) -> str:
        """Return the name of the checkpoint that is never removed; empty if there is none."""
        try:
            kept = json_format.Parse((self.directory / KEPT).read_text(), checkpoint_pb2.KeptCheckpoint())
        except (OSError, json_format.ParseError):
            return ""
        return kept.name

    def keep_always(self, name: str, reason: str) -> None:
        """Mark a checkpoint as never to be removed, in place of the one marked before.

        Raises:
            SluiceError: NOT_FOUND if there is no complete checkpoint of this name.
        """
        if self.find(name) is None:
            raise SluiceError.not_found(
                "NO_CHECKPOINT", f"there is no complete checkpoint {name!r} in {self.directory}"
            )
        kept = checkpoint_pb2.KeptCheckpoint(name=name, reason=reason)
        write_durably(self.directory / KEPT, (json_format.MessageToJson(kept) + "\n").encode())
        log.info("checkpoint stays", name=name, reason=reason)

    def load(self, manifest: checkpoint_pb2.CheckpointManifest, engines: Mapping[str, TrainEngine]) -> None:
        """Restore the state of a checkpoint; for errors see `Saver.load`."""
        self.saver.load(self.directory / manifest.checkpoint.name, engines)

    def _prune(self, written: Version, known: Lineage) -> None:
        kept = self.kept()
        others = [each for each in self.complete() if each.checkpoint.name != kept]
        for manifest in surplus(others, written, known, self.keep):
            path = self.directory / manifest.checkpoint.name
            gone = path.with_name(f".{path.name}.retired")
            remove_tree(gone)
            try:
                path.rename(gone)  # a half-removed checkpoint must not look complete; the next start removes it
            except OSError as error:
                log.warning("a surplus checkpoint could not be removed", path=str(path), error=str(error))
                continue
            if remove_tree(gone):
                log.info("checkpoint removed", name=path.name, keep=self.keep)


def surplus(
    complete: Sequence[checkpoint_pb2.CheckpointManifest], written: Version, known: Lineage, keep: int
) -> list[checkpoint_pb2.CheckpointManifest]:
    """Return the complete checkpoints (newest first) to remove, after one was written. Pure.

    Keep the newest checkpoints from which the written version descends. Keep checkpoints that a rollback left behind only while
    there are fewer than `keep` others.
    """
    return sorted(complete, key=lambda each: known.is_retired(origin_of(each), written))[keep:]


def origin_of(manifest: checkpoint_pb2.CheckpointManifest | None) -> Version:
    """Return the version at which a checkpoint was written; for None, the base model's version."""
    return BASE if manifest is None else Version.from_proto(manifest.checkpoint.policy_version)


def _lineage(message: checkpoint_pb2.EpochLineage) -> Lineage:
    return Lineage({each.epoch: Version.from_proto(each.restored_version) for each in message.origins})


def _lineage_message(lineage: Lineage) -> checkpoint_pb2.EpochLineage:
    return checkpoint_pb2.EpochLineage(
        origins=[
            checkpoint_pb2.EpochOrigin(epoch=epoch, restored_version=origin.to_proto())
            for epoch, origin in sorted(lineage.origins.items())
        ]
    )
