"""The output of an offline run, and the checkpoints that it resumes from after a kill.

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
"""One is complete while the next is written."""

EXPORTED = "exported"
"""File beside the checkpoints. With it, an output that exists was written by this run."""

_MAY_CHANGE = {
    *(ComputeConfig.model_fields.keys() - OptimizerConfig.model_fields.keys() - {"lora", "dtype"}),
    *("output", "resume", "checkpoint_every", "log_every", "eval_every", "save_dtype"),
    *("eval_data", "eval_split", "evaluation", "metric", "min_gain"),
}
"""Settings that change neither the weights nor the order of the data: where and how a step is computed, what is reported."""


_COMPARED = {"eval_data", "eval_split", "evaluation", "metric", "min_gain"}
"""Those of them that must not change where evaluations of the run are compared with each other."""


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
        FileExistsError: if the output exists, or checkpoints for it exist without `resume`.
        ConfigError: if the directory above the output cannot be made.
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
            ConfigError: if the run that wrote it had other settings, or it is damaged.
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
            ConfigError: if the one before could not be written, or the weights must not be.
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
        """Refuse weights that are not finite, or compute nothing finite; what is on disk stays as it is.

        Args:
            step: The step that made them.
            dtype: Precision in which they will be written; None keeps float32.
            rows: This rank's rows to compute with, perhaps none; None: only the weights themselves are looked at.

        Raises:
            ConfigError: with the names of some weights, if these are at fault, and the remedy.
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
        """Record that this run writes the output, so that a kill before `remove` loses nothing."""
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
        if self._engine.chat_template is not None:  # what the file says, wherever it is
            settings["chat_template"] = json.dumps(hashlib.sha256(self._engine.chat_template.encode()).hexdigest())
        return settings

    def _check_settings(self, written: Mapping[str, str]) -> None:
        """Compare the settings with those of the checkpoint, whose manifest has none if another program wrote it."""
        own = self._settings
        if written:  # an earlier release did not have every setting: it did as the default says
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
    """Return the settings that a checkpoint holds, as TOML."""
    may_change = _MAY_CHANGE - (_COMPARED if config.compares else set())
    return dict(_flat(config.model_dump(mode="json", exclude=may_change, exclude_none=True)))


def _flat(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting with its TOML value; those of a table with the table's name before theirs."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, json.dumps(value)
