"""The commands of offline training: `sluice sft`, `dpo`, `reward-model`, `distill`, and `sluice merge-adapter`.

Nothing here imports torch before the work begins.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import Field, model_validator

from sluice.chat_template import TEMPLATE_FILE, check_chat_template, read_template
from sluice.config import Command, ConfigError, Section, load_command
from sluice.environments.datasets import parts
from sluice.errors import reason_of
from sluice.imports import large_imports
from sluice.models import ADAPTER_SETTINGS, check_files, check_hub, check_model
from sluice.progress import doing
from trainer_svc.compute_config import check_sizes
from trainer_svc.offline.config import (
    DistillConfig,
    DpoConfig,
    OfflineConfig,
    RewardModelConfig,
    SftConfig,
    is_file,
    make_parent,
)
from trainer_svc.offline.playing import check_evaluation

_Config = TypeVar("_Config", bound=OfflineConfig)


def load_offline(config_class: type[_Config], argv: list[str], command: str) -> _Config:
    """Resolve the settings: flags > files (later wins) > `SLUICE_<COMMAND>__*` > defaults.

    Raises:
        ConfigError: if a setting is unknown, malformed or out of range, `model` cannot be a model, or the data does not exist.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` has printed its output.
    """
    return load_command(config_class, argv, command, check=_check)


def _run(config_class: type[OfflineConfig], command: str, argv: list[str]) -> int:
    """Train: print a line of progress every `log_every` steps and a summary. Under torchrun, rank 0 prints.

    Raises:
        ConfigError: if the data, the output, a checkpoint or the number of processes does not fit.
    """
    config = load_offline(config_class, argv, command)
    for setting, model in _models(config).items():
        check_hub(model, setting)
    with doing("load PyTorch"), large_imports():  # `--help` must not import it
        import torch.distributed as dist  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

        from trainer_svc.offline.checkpoints import FinishedError, remove_checkpoints  # noqa: PLC0415
        from trainer_svc.offline.runs import run  # noqa: PLC0415
        from trainer_svc.parallel.mesh import join  # noqa: PLC0415

    logging.disable_progress_bar()
    try:
        mesh = join(config.parallel, config.device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    say: Callable[[object], None] = _print if mesh.rank == 0 else lambda _: None
    try:
        run(config, say, mesh)
    except FinishedError as finished:
        if dist.is_initialized():
            dist.barrier()  # wait until every rank has checked the directories
        if mesh.rank == 0:
            remove_checkpoints(config.output)
        say(finished)
    except FileExistsError as error:
        raise ConfigError(str(error)) from error
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _check(config: OfflineConfig) -> None:
    """Find errors before anything is loaded.

    Raises:
        ConfigError: if a model setting cannot be a model, the data does not exist, or a split is set for data without splits.
    """
    for setting, model in _models(config).items():
        check_model(model, setting)
        check_sizes(model, setting, config.parallel, config.lora if setting == "model" else None)
        check_files(model, setting)
    check_chat_template(config.model, config.chat_template, config.chat_template_kwargs)
    config.check_compiler()
    for setting, data in (("split", config.data), ("eval_split", config.eval_data)):
        files = [is_file(each.dataset) for each in parts(data)] if data else []
        if files and all(files) and setting in config.model_fields_set:
            raise ConfigError(f"{setting}: {data} is a file, which has no splits: remove {setting}, or name a dataset")
    check_evaluation(config)


def _models(config: OfflineConfig) -> dict[str, str]:
    """Return the models to load, by the name of their setting."""
    return {name: getattr(config, name) for name in ("model", "teacher") if hasattr(config, name)}


def _print(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


SFT = Command("sft", "fine-tune a model on demonstrations", partial(_run, SftConfig, "sft"))
DPO = Command("dpo", "train a model on preferences", partial(_run, DpoConfig, "dpo"))
REWARD_MODEL = Command(
    "reward-model", "train a reward model on preferences", partial(_run, RewardModelConfig, "reward-model")
)
DISTILL = Command("distill", "train a model on a teacher's log-probabilities", partial(_run, DistillConfig, "distill"))


# Merging an adapter.


SETTINGS, WEIGHTS = ADAPTER_SETTINGS, "adapter_model.safetensors"
"""The two files of an adapter."""


class MergeConfig(Section):
    """What is merged."""

    adapter: Path = Field(Path(), description="Directory of the adapter, as PEFT writes it.")
    model: str = Field(
        "", description="Base model: a Hugging Face directory or hub id; empty: the one that the adapter names."
    )
    output: Path = Field(Path("outputs/merged"), description="Model directory to write; must not exist.")
    save_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision of the written weights; they are added up in float32."
    )

    @model_validator(mode="after")
    def _has_adapter(self) -> Self:
        if self.adapter == Path():
            raise ValueError("adapter is not set: give --adapter DIRECTORY")
        return self


def merge(argv: list[str]) -> int:
    """Merge an adapter, and print what was written."""
    config = load_command(MergeConfig, argv, "merge-adapter", check=_check_merge)
    base = _base_of(config)
    check_hub(base)
    make_parent(config.output)
    with large_imports():
        import torch  # noqa: PLC0415  `--help` must not import torch
        from safetensors import SafetensorError  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

        from trainer_svc.engine.finite import UnfitWeightsError  # noqa: PLC0415
        from trainer_svc.engine.lora import UnmergeableError, merge_adapter  # noqa: PLC0415

    logging.disable_progress_bar()
    failed = f"cannot merge {config.adapter} into {base}"
    try:
        own = config.adapter / TEMPLATE_FILE  # the base's template, or another one that the adapter was trained with
        template = read_template(own) if own.is_file() else None
        with doing(f"merge {config.adapter} into {base}"):
            merge_adapter(base, str(config.adapter), config.output, getattr(torch, config.save_dtype), template)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{failed}: {reason_of(error)}; give directories as save_pretrained writes them") from error
    except UnfitWeightsError as error:
        raise ConfigError(f"{failed}: {error}; give an adapter from before, or a wider --save-dtype") from error
    except UnmergeableError as error:
        raise ConfigError(f"{failed}: {reason_of(error)}; serve base and adapter side by side") from error
    except ValueError as error:
        raise ConfigError(f"{failed}: {reason_of(error)}; give the adapter's own base with --model") from error
    sys.stdout.write(f"{config.output}: {base} with {config.adapter} merged in, {config.save_dtype}\n")
    return 0


def _check_merge(config: MergeConfig) -> None:
    """Find errors before anything is loaded.

    Raises:
        ConfigError: if the directory holds no adapter, its base cannot be a model, or the output exists.
    """
    for name in (SETTINGS, WEIGHTS):
        if not (config.adapter / name).is_file():
            raise ConfigError(f"adapter: {config.adapter} holds no adapter as PEFT writes it: it has no {name}")
    if config.output.exists():
        raise ConfigError(f"output: {config.output} exists: remove it, or choose another directory")
    base = _base_of(config)
    try:
        check_model(base)
        check_files(base)
    except ConfigError as error:
        if config.model:
            raise
        raise ConfigError(f"{error}; it is the base that the adapter names: give another one with --model") from error


def _base_of(config: MergeConfig) -> str:
    """Return the base model: the given one, or the one that the adapter names.

    Raises:
        ConfigError: if there is neither.
    """
    if config.model:
        return config.model
    path = config.adapter / SETTINGS
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"adapter: cannot read {path}: {reason_of(error)}; give the directory of an adapter"
        ) from error
    named = written.get("base_model_name_or_path") if isinstance(written, dict) else None
    if not isinstance(named, str) or not named:
        raise ConfigError(f"adapter: {path} names no base model: give it with --model")
    return named


MERGE_ADAPTER = Command("merge-adapter", "add a LoRA adapter to the weights of its base", merge)
