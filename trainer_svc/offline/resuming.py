"""Checkpoints of an offline run, from which it goes on after a kill; they are gone when its model is written."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from pathlib import Path

from sluice.config import ConfigError
from sluice.v1.checkpoint_pb2 import CheckpointManifest
from sluice.v1.trainer_pb2 import Checkpoint
from sluice.versions import Version
from trainer_svc.checkpoint.checkpoints import Checkpoints
from trainer_svc.checkpoint.manifest import write_durably
from trainer_svc.checkpoint.saver import SAVE_S, Saver
from trainer_svc.checkpoint.state import POLICY, training_state
from trainer_svc.compute_config import ComputeConfig, OptimizerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.offline.settings import OfflineConfig

__all__ = ["RunCheckpoints", "checkpoint_directory"]

KEEP = 2
"""One is whole while the next is written."""

SETTINGS = "settings.json"
"""Beside the checkpoints: what the run that wrote them was told."""

_MAY_CHANGE = {
    *(ComputeConfig.model_fields.keys() - OptimizerConfig.model_fields.keys() - {"lora", "dtype"}),
    *("output", "resume", "checkpoint_every", "log_every", "eval_every", "eval_data", "eval_split", "save_dtype"),
}
"""Settings that neither the weights nor the order of the data follow from: where and how a step is computed, what is told."""


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
        self._kept = Checkpoints(checkpoint_directory(config.output), KEEP, Saver.of(engine.mesh))
        self._writing: Future[CheckpointManifest] | None = None

    def resume(self) -> int:
        """Go on from the newest checkpoint, if the settings say so and there is one.

        Returns:
            The number of steps that are done.

        Raises:
            ConfigError: if the run that wrote it had other settings.
        """
        if not self._config.resume:
            return 0
        newest = next(iter(self._kept.complete()), None)
        if newest is None:
            return 0
        self._check_settings()
        self._kept.load(newest, {POLICY: self._engine})
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
            checkpoint=Checkpoint(policy_version=Version(1, step).to_proto()),
            optimizer_steps=self._engine.optimizer_steps,
        )
        if self._engine.mesh.rank == 0:
            self._kept.directory.mkdir(parents=True, exist_ok=True)
            write_durably(self._kept.directory / SETTINGS, json.dumps(self._settings).encode())
        state = training_state({POLICY: self._engine}, self._engine.mesh.rank)
        self._writing = self._kept.begin(manifest, state)

    def remove(self) -> None:
        """Remove them all: the run is done."""
        self._settle()
        if self._engine.mesh.rank == 0:
            shutil.rmtree(self._kept.directory, ignore_errors=True)

    @property
    def _settings(self) -> dict[str, object]:
        dumped: dict[str, object] = self._config.model_dump(mode="json", exclude=_MAY_CHANGE)
        return dumped

    def _check_settings(self) -> None:
        path = self._kept.directory / SETTINGS
        if not path.exists():
            return
        began = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name, value in self._settings.items() if began.get(name) != value]
        if changed:
            told = ", ".join(f"{name} = {json.dumps(began.get(name))}" for name in changed)
            raise ConfigError(f"the run to go on with began with {told}: set them so, or remove {path.parent}")

    def _settle(self) -> None:
        if self._writing is not None:
            self._writing.result(SAVE_S)
