"""What every kind of offline training is told. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from trainer_svc.compute_config import ComputeConfig, check_decay

__all__ = ["OfflineConfig"]


class OfflineConfig(ComputeConfig):
    """Training on files of data; the file is flat: its keys stand at the top level."""

    model: str = Field("", description="Model to start from: a Hugging Face directory or hub id.")
    data: str = Field("", description="Examples: a JSONL file, a dataset directory or a hub dataset id.")
    split: str = Field("train", description="Split of a dataset; a file has none.")
    output: Path = Field(Path("outputs/offline"), description="Model directory to write; must not exist.")
    batch_size: int = Field(64, ge=1, le=1 << 20, description="Examples per optimizer step.")
    epochs: float = Field(1.0, gt=0, description="Passes over the data; read where `max_steps` is 0.")
    max_length: int = Field(4096, ge=2, description="Longest example in tokens; see `on_long`.")
    on_long: Literal["error", "drop"] = Field(
        "error", description="What happens to longer examples: stop with an error, or leave them out and count them."
    )
    eval_data: str = Field(
        "", description="Held-out examples to report the loss of, as `data`; empty: see `eval_share`."
    )
    eval_split: str = Field("test", description="Split of `eval_data` where that is a dataset.")
    eval_share: float = Field(
        0.0, ge=0, lt=1, description="Share of `data` that is held out where `eval_data` is empty; 0 holds nothing out."
    )
    eval_every: int = Field(
        0, ge=0, description="Optimizer steps between two reports on held-out examples; 0: before and after training."
    )
    checkpoint_every: int = Field(
        0, ge=0, description="Optimizer steps between two checkpoints in `OUTPUT.checkpoints`; 0 writes none."
    )
    resume: bool = Field(
        False,
        description="Go on from the newest checkpoint, with the settings and the data of the run that wrote it; where there is none, from the start, which is said.",
    )
    seed: int = Field(0, ge=0, description="Seed of the order of the data, and of new weights.")
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
        if self.parallel.pp > 1:
            raise ValueError(
                "the model is written at the end, which takes all layers in one stage: set parallel.pp to 1"
            )
        if "eval_split" in self.model_fields_set and not self.eval_data:
            raise ValueError("eval_split is read with eval_data alone: remove it, or set eval_data")
        if self.max_steps:
            check_decay(self)
        if self.eval_data and self.eval_share:
            raise ValueError("eval_data and eval_share both say what is held out: remove one of them")
        return self
