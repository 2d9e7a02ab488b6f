"""`sluice merge-adapter --adapter DIR --output DIR`: a LoRA adapter added to the weights of its base."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from sluice.cli.command import Command
from sluice.config import ConfigError, Section, check_model, load_command

__all__ = ["COMMAND", "MergeConfig"]


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
    config = load_command(MergeConfig, argv, "merge-adapter")
    settings = config.adapter / "adapter_config.json"
    if not settings.is_file():
        raise ConfigError(f"adapter: {config.adapter} holds no adapter: it has no adapter_config.json")
    base = config.model or json.loads(settings.read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
    check_model(base)
    import torch  # noqa: PLC0415  `--help` must not import torch
    from transformers.utils import logging  # noqa: PLC0415

    from trainer_svc.engine.adapter_export import merge_adapter  # noqa: PLC0415

    logging.disable_progress_bar()
    try:
        merge_adapter(base, str(config.adapter), config.output, getattr(torch, config.save_dtype))
    except (FileExistsError, ValueError) as error:
        raise ConfigError(str(error)) from error
    sys.stdout.write(f"{config.output}: {base} with {config.adapter} merged in, {config.save_dtype}\n")
    return 0


COMMAND = Command("merge-adapter", "add a LoRA adapter to the weights of its base", run)
