"""Checkpoints of an offline run, from which it goes on after a kill; they are gone when its model is written."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path

from sluice.v1.checkpoint_pb2 import CheckpointManifest
from sluice.v1.trainer_pb2 import Checkpoint
from sluice.versions import Version
from trainer_svc.checkpoint.checkpoints import Checkpoints
from trainer_svc.checkpoint.saver import Saver
from trainer_svc.checkpoint.state import training_state
from trainer_svc.checkpoint.writers import Writers
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.offline.settings import OfflineConfig

__all__ = ["RunCheckpoints", "checkpoint_directory"]

NAME = "policy"
"""The engine's name in a checkpoint."""

KEEP = 2
"""One is whole while the next is written."""

SAVE_S = 1800.0
"""Seconds that a checkpoint may take to be written."""


def checkpoint_directory(output: Path) -> Path:
    """Where a run that writes `output` keeps its checkpoints."""
    return output.with_name(f"{output.name}.checkpoints")


class RunCheckpoints:
    """The checkpoints of one run. Every process makes the same calls.

    Args:
        engine: What is trained.
        config: The settings.
    """

    def __init__(self, engine: TrainEngine, config: OfflineConfig) -> None:
        self._engine, self._config = engine, config
        saver = Saver(Writers.of(engine.mesh, SAVE_S), SAVE_S)
        self._kept = Checkpoints(checkpoint_directory(config.output), KEEP, saver)
        self._writing: Future[CheckpointManifest] | None = None

    def resume(self) -> int:
        """Go on from the newest checkpoint, if the settings say so and there is one.

        Returns:
            The number of steps that are done.
        """
        if not self._config.resume:
            return 0
        newest = next(iter(self._kept.complete()), None)
        if newest is None:
            return 0
        self._kept.load(newest, {NAME: self._engine})
        return newest.checkpoint.policy_version.number

    def after(self, step: int) -> None:
        """Begin to write a checkpoint where one is due; training goes on meanwhile.

        Raises:
            OSError: if the one before could not be written.
        """
        if not self._config.checkpoint_every or step % self._config.checkpoint_every:
            return
        self._settle()
        manifest = CheckpointManifest(
            checkpoint=Checkpoint(name=f"step_{step}", policy_version=Version(1, step).to_proto()),
            optimizer_steps=self._engine.optimizer_steps,
        )
        state = training_state({NAME: self._engine}, self._engine.mesh.rank)
        self._writing = self._kept.begin(manifest, state, None)

    def remove(self) -> None:
        """Remove them all: the run is done."""
        self._settle()
        if self._engine.mesh.rank == 0:
            shutil.rmtree(self._kept.directory, ignore_errors=True)

    def _settle(self) -> None:
        if self._writing is not None:
            self._writing.result(SAVE_S)
