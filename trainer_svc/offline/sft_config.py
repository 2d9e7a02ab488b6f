"""Settings of `sluice sft`. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from trainer_svc.config import ComputeConfig

__all__ = ["SftConfig"]


class SftConfig(ComputeConfig):
    """Supervised fine-tuning; the file is flat: its keys stand at the top level."""

    model: str = Field("", description="Model to start from: a Hugging Face directory or hub id.")
    data: str = Field(
        "",
        description="Demonstrations: a JSONL file, a dataset directory or a hub dataset id, with rows of `messages`, or of `prompt` and "
        "`completion` (texts are joined as they are; lists of messages are rendered as a chat).",
    )
    split: str = Field("train", description="Split of a hub dataset.")
    output: Path = Field(Path("outputs/sft"), description="Model directory to write; must not exist.")
    batch_size: int = Field(64, ge=1, description="Demonstrations per optimizer step.")
    epochs: float = Field(1.0, gt=0, description="Passes over the data; read where `max_steps` is 0.")
    max_length: int = Field(4096, ge=2, description="Longest demonstration in tokens; see `on_long`.")
    on_long: Literal["error", "drop"] = Field(
        "error",
        description="What happens to longer demonstrations: stop with an error, or leave them out and count them.",
    )
    seed: int = Field(0, ge=0, description="Seed of the order of the data.")
    log_every: int = Field(20, ge=1, description="Optimizer steps between two lines of progress.")
    save_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision of the written weights."
    )
    lr: float = Field(1e-5, ge=0, description="Peak learning rate, per step.")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name in ("model", "data"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set: give --{name}, or {name} = ... in the file")
        return self
