"""`sluice merge-adapter --adapter DIR --output DIR`: a LoRA adapter added to the weights of its base."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from sluice.config import Command, ConfigError, Section, load_command, reason_of
from sluice.models import check_files, check_hub, check_model
from trainer_svc.offline.config import make_parent

__all__ = ["COMMAND", "MergeConfig"]

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
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


def run(argv: list[str]) -> int:
    """Merge, and say what was written."""
    config = load_command(MergeConfig, argv, "merge-adapter", check=_check)
    base = _base(config)
    check_hub(base)
    make_parent(config.output)
    import torch  # noqa: PLC0415  `--help` must not import torch
    from safetensors import SafetensorError  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    from trainer_svc.engine.adapter_export import merge_adapter  # noqa: PLC0415

    logging.disable_progress_bar()
    failed = f"cannot merge {config.adapter} into {base}"
    try:
        merge_adapter(base, str(config.adapter), config.output, getattr(torch, config.save_dtype))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{failed}: {reason_of(error)}; give directories as save_pretrained writes them") from error
    except ValueError as error:
        raise ConfigError(f"{failed}: {reason_of(error)}; give the adapter's own base with --model") from error
    sys.stdout.write(f"{config.output}: {base} with {config.adapter} merged in, {config.save_dtype}\n")
    return 0


def _check(config: MergeConfig) -> None:
    """Find what would fail later, before anything is loaded.

    Raises:
        ConfigError: if the adapter is none, its base cannot be a model, or the output exists.
    """
    for name in (SETTINGS, WEIGHTS):
        if not (config.adapter / name).is_file():
            raise ConfigError(f"adapter: {config.adapter} holds no adapter as PEFT writes it: it has no {name}")
    if config.output.exists():
        raise ConfigError(f"output: {config.output} exists: remove it, or choose another directory")
    base = _base(config)
    try:
        check_model(base)
        check_files(base)
    except ConfigError as error:
        if config.model:
            raise
        raise ConfigError(f"{error}; it is the base that the adapter names: give another one with --model") from error


def _base(config: MergeConfig) -> str:
    """The base model: the one that is given, or that the adapter names.

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


COMMAND = Command("merge-adapter", "add a LoRA adapter to the weights of its base", run)
