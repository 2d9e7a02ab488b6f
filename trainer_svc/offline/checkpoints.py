"""The output of an offline run, and the checkpoints from which it resumes after a kill.

outputs/sft                 the model directory; appears when the run has finished
outputs/sft.checkpoints     during the run: step_*/, and the file `exported` just before the model is written
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from sluice.config import ConfigError
from sluice.host_files import remove_tree
from sluice.v1 import checkpoint_pb2
from sluice.v1.trainer_pb2 import Checkpoint
from sluice.versions import Version
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.checkpoint.checkpoints import Checkpoints
from trainer_svc.checkpoint.saver import SAVE_S, CheckpointDamagedError, Saver, write_durably
from trainer_svc.checkpoint.state import POLICY, training_state
from trainer_svc.compute_config import ComputeConfig, OptimizerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.finite import describe_unfit
from trainer_svc.offline.config import OfflineConfig, make_parent

KEEP = 2
"""Checkpoints to keep: one is complete while the next is written."""

EXPORTED = "exported"
"""File beside the checkpoints. If it exists, an existing output was written by this run."""

_MAY_CHANGE = {
    *(ComputeConfig.model_fields.keys() - OptimizerConfig.model_fields.keys() - {"lora", "dtype"}),
    *("output", "resume", "checkpoint_every", "log_every", "eval_every", "save_dtype"),
    *("eval_data", "eval_split", "evaluation", "metric", "min_gain"),
}
"""Settings that a resumed run may change: they affect neither the weights nor the order of the data, only where and how a step is
computed and what is reported."""


_COMPARED = {"eval_data", "eval_split", "evaluation", "metric", "min_gain"}
"""Of these settings, those that must not change if the run compares its evaluations with each other."""


class FinishedError(Exception):
    """The run to resume has already finished and written its model."""


def checkpoint_directory(output: Path) -> Path:
    """Return the directory for the checkpoints of the run that writes `output`."""
    return output.with_name(f"{output.name}.checkpoints")


def remove_checkpoints(output: Path) -> None:
    """Remove the checkpoints of a run that has finished."""
    remove_tree(checkpoint_directory(output))


def claim_output(config: OfflineConfig) -> None:
    """Check that the run may write its output, before anything is loaded for it.

    Raises:
        FinishedError: if `resume` is set and the run had written its output before it was killed.
        FileExistsError: if the output exists, or checkpoints for it exist and `resume` is not set.
        ConfigError: if the directory above the output cannot be created.
    """
    output, checkpoints = config.output, checkpoint_directory(config.output)
    if not output.exists():
        if checkpoints.exists() and not config.resume:
            raise FileExistsError(
                f"{checkpoints} holds checkpoints of a run that did not finish: give --resume to continue it, or remove the directory"
            )
        make_parent(output)
    elif (checkpoints / EXPORTED).exists() and config.resume:
        raise FinishedError(
            f"{output}: the run had finished; its model is complete, and its checkpoints are removed now"
        )
    elif (checkpoints / EXPORTED).exists():
        raise FileExistsError(
            f"{output} is the finished model of an earlier run: keep it and set output to another directory (--resume removes its leftover checkpoints)"
        )
    elif checkpoints.exists():
        raise FileExistsError(
            f"{output} exists, but the run whose checkpoints are in {checkpoints} did not write it: move it away, or set output to another directory"
        )
    elif config.resume:
        raise FileExistsError(
            f"{output} exists and there is no checkpoint to resume from: the run has finished, or another one wrote it; keep it, and set output to another directory to train again"
        )
    else:
        raise FileExistsError(f"{output} exists: set output to another directory, or remove it")


class RunCheckpoints:
    """The checkpoints of one offline run. Every rank makes the same calls."""

    def __init__(self, engine: TrainEngine, config: OfflineConfig) -> None:
        self._engine, self._config = engine, config
        self._kept = Checkpoints(checkpoint_directory(config.output), KEEP, Saver.of(engine.mesh))
        self._writing: Future[checkpoint_pb2.CheckpointManifest] | None = None

    def resume(self) -> int:
        """Restore the newest checkpoint, if `resume` is set and there is one; return the number of steps that are done.

        Raises:
            ConfigError: if the run that wrote the checkpoint had other settings, or the checkpoint is damaged.
        """
        if not self._config.resume:
            return 0
        for name, problem in self._kept.incomplete().items():
            raise ConfigError(f"{problem}: check the disk; to resume without it, remove {self._kept.directory / name}")
        complete = self._kept.complete()
        if not complete:
            return 0
        newest, older = complete[0], complete[1:]
        self._check_settings(newest.settings)
        try:
            self._kept.load(newest, {POLICY: self._engine})
        except CheckpointDamagedError as error:
            directory = self._kept.directory / newest.checkpoint.name
            instead = older[0].checkpoint.name if older else "the beginning"
            raise ConfigError(f"{error}; to resume from {instead}, remove {directory}") from error
        except OSError as error:
            raise ConfigError(
                f"checkpoint {newest.checkpoint.name} of {self._kept.directory}, which may not be damaged, cannot be read ({error}):"
                " check the disk and the logs of all ranks, then resume again"
            ) from error
        except ValueError as error:
            raise ConfigError(f"cannot resume from {self._kept.directory}: {error}") from error
        return newest.checkpoint.policy_version.number

    def after(self, step: int) -> None:
        """Begin to write a checkpoint if one is due; training continues meanwhile.

        Raises:
            ConfigError: if the previous checkpoint could not be written, or the weights are not finite.
        """
        if not self._config.checkpoint_every or step % self._config.checkpoint_every:
            return
        self.require_fit(step)
        self._settle()
        manifest = checkpoint_pb2.CheckpointManifest(
            checkpoint=Checkpoint(policy_version=Version(1, step).to_proto()),
            optimizer_steps=self._engine.optimizer_steps,
            settings=self._settings,
        )
        state = training_state({POLICY: self._engine}, self._engine.mesh.rank)
        self._writing = self._kept.begin(manifest, state)

    def require_fit(
        self, step: int, dtype: torch.dtype | None = None, *, rows: Sequence[TrainingRow] | None = None
    ) -> None:
        """Raise if weights are not finite, or the model computes NaN with them. Files on disk are not changed.

        Args:
            step: The step that made the weights.
            dtype: Precision in which they will be written; None keeps float32.
            rows: This rank's rows to compute with, possibly empty; None: check only the weights themselves.

        Raises:
            ConfigError: with the remedy and, if weights are not finite, the names of some.
        """
        engine = self._engine
        if found := engine.unfit_weights(dtype):
            fault = describe_unfit(found, dtype)
        elif rows is not None and _computes_nan(engine, rows):
            fault = (
                "training made weights with which the model computes NaN, although each is finite; lower the learning rate (lr),"
                " limit the gradient (grad_clip), and train again from the weights before"
            )
        else:
            return
        self._settle()
        kept = self._kept.complete()
        instead = f"{self._kept.directory / kept[0].checkpoint.name} stays" if kept else "there is no checkpoint"
        raise ConfigError(
            f"step {step} with lr = {self._config.lr:g}: {fault}; nothing was written to {self._config.output}, {instead}"
        )

    def before_export(self) -> None:
        """Note on disk that this run writes the output. If it is killed before `remove`, a resumed run recognises its output."""
        self._settle()
        if self._engine.mesh.rank == 0 and self._kept.directory.exists():
            write_durably(self._kept.directory / EXPORTED, b"")

    def remove(self) -> None:
        """Remove the checkpoints of the finished run."""
        if self._engine.mesh.rank == 0:
            remove_checkpoints(self._config.output)

    @property
    def _settings(self) -> dict[str, str]:
        settings = _written(self._config)
        if self._engine.chat_template is not None:  # compare the template's content, not its path
            settings["chat_template"] = json.dumps(hashlib.sha256(self._engine.chat_template.encode()).hexdigest())
        return settings

    def _check_settings(self, written: Mapping[str, str]) -> None:
        """Compare the settings with the checkpoint's. If another program wrote the checkpoint, its manifest has no settings."""
        own = self._settings
        if written:  # a setting that an earlier release lacked counts as its default
            written = {**_written(type(self._config).model_construct()), **written}
        changed = [name for name in sorted({*own, *written}) if own.get(name) != written.get(name)] if written else []
        if changed:
            began = ", ".join(f"{name} = {written.get(name, 'unset')}" for name in changed)
            raise ConfigError(
                f"the checkpoint was written with {began}: resume with the same settings, or remove {self._kept.directory} to start again"
            )

    def _settle(self) -> None:
        if self._writing is None:
            return
        try:
            self._writing.result(SAVE_S)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"a checkpoint could not be written ({error}): free space for {self._kept.directory}, then continue with --resume"
            ) from error


def _computes_nan(engine: TrainEngine, rows: Sequence[TrainingRow]) -> bool:
    """Return whether the network computes NaN for the loss tokens of the rows of any rank."""
    computed = zip(rows, engine.forward(rows), strict=True)
    count = sum(int(values[row.loss_mask].isnan().sum()) for row, values in computed)
    return engine.ranks.total({"nan": count})["nan"] > 0


def _written(config: OfflineConfig) -> dict[str, str]:
    """Return the settings to store in a checkpoint, as TOML values by name."""
    may_change = _MAY_CHANGE - (_COMPARED if config.compares else set())
    return dict(_flat(config.model_dump(mode="json", exclude=may_change, exclude_none=True)))


def _flat(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting with its TOML value. Settings of a table have names that begin with the table's name."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, json.dumps(value)
