"""The checkpoints of one run: which are whole, which stay."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import structlog
import torch

from sluice.v1.checkpoint_pb2 import CheckpointManifest
from sluice.versions import Version
from trainer_svc.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from trainer_svc.checkpoint.saver import Export, Saver, recover
from trainer_svc.checkpoint.state import Trained

__all__ = ["Checkpoints"]

log = structlog.get_logger(__name__)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: Holds one directory per checkpoint; made when the first one is written.
        keep: Complete checkpoints that stay, the newest ones.
        saver: Writes and reads them.
    """

    def __init__(self, directory: Path, keep: int, saver: Saver) -> None:
        self.directory = directory
        self.keep = keep
        self.saver = saver

    def complete(self) -> list[CheckpointManifest]:
        """Manifests of the complete checkpoints, newest version first."""
        found = map(read_manifest, self.directory.glob(f"step_*/{MANIFEST}"))
        return sorted(filter(None, found), key=_version, reverse=True)

    def sweep(self) -> None:
        """Remove what interrupted writes left behind; nothing is being written now."""
        for path in list(self.directory.glob(".step_*")):
            recover(self.directory / path.name.split(".")[1])
            shutil.rmtree(path, ignore_errors=True)

    def find(self, name: str) -> CheckpointManifest | None:
        """The complete checkpoint of this name."""
        return next((manifest for manifest in self.complete() if manifest.checkpoint.name == name), None)

    def begin(
        self, manifest: CheckpointManifest, tensors: Mapping[str, torch.Tensor], export: Export | None
    ) -> Future[CheckpointManifest]:
        """Copy the state, write it in the background, and remove the checkpoints beyond those to keep.

        Args, errors and result are those of `Saver.begin`.
        """
        target = self.directory / manifest.checkpoint.name
        return self.saver.begin(target, manifest, tensors, export=export, after=self._prune)

    def load(self, manifest: CheckpointManifest, engines: Mapping[str, Trained]) -> None:
        """Put the state of a checkpoint back; errors are those of `Saver.load`."""
        self.saver.load(self.directory / manifest.checkpoint.name, engines)

    def note_position(self, manifest: CheckpointManifest, journal_position: int) -> CheckpointManifest:
        """Record where the orchestrator's journal stands, unless a later position is recorded already.

        Raises:
            OSError: if the manifest cannot be replaced; the old one stays.
        """
        if journal_position <= manifest.checkpoint.journal_position:
            return manifest
        updated = CheckpointManifest()
        updated.CopyFrom(manifest)
        updated.checkpoint.journal_position = journal_position
        write_manifest(updated, self.directory / manifest.checkpoint.name)
        return updated

    def _prune(self) -> None:
        for manifest in self.complete()[self.keep :]:
            path = self.directory / manifest.checkpoint.name
            gone = path.with_name(f".{path.name}.retired")
            shutil.rmtree(gone, ignore_errors=True)
            try:
                path.rename(
                    gone
                )  # a half-removed checkpoint is not taken for a whole one, and the next start sweeps it
                shutil.rmtree(gone)
            except OSError as error:
                log.warning(
                    "a checkpoint that is not to be kept could not be removed", path=str(path), error=str(error)
                )
            else:
                log.info("checkpoint removed", name=path.name, keep=self.keep)


def _version(manifest: CheckpointManifest) -> Version:
    return Version.from_proto(manifest.checkpoint.policy_version)
