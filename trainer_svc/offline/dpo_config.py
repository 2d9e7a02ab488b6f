"""Settings of `sluice dpo`. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from trainer_svc.offline.settings import OfflineConfig

__all__ = ["PAIRS", "DpoConfig"]

PAIRS = (
    "Pairs of answers: a JSONL file, a dataset directory or a hub dataset id, with rows of `prompt`, `chosen` and `rejected`"
    " (texts are joined as they are; lists of messages are rendered as a chat, with `tools` if given)."
)


class DpoConfig(OfflineConfig):
    """Training on preferences; the file is flat: its keys stand at the top level.

    The reference is the model to start from. Its log-probabilities are computed once, before the first step.
    """

    data: str = Field("", description=PAIRS)
    output: Path = Field(Path("outputs/dpo"), description="Model directory to write; must not exist.")
    lr: float = Field(1e-6, ge=0, description="Peak learning rate, per step.")
    objective: Literal["dpo", "ipo"] = Field(
        "dpo",
        description="dpo: log loss of the scaled difference of gains; ipo: squared distance of the difference per token from 1 / (2 beta).",
    )
    beta: float = Field(
        0.1, gt=0, description="Reward per nat over the reference; larger ones stay nearer to the reference."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="dpo: share of pairs that are taken to be labelled the wrong way round."
    )
    sft_weight: float = Field(
        0.0, ge=0, description="Weight of the mean negative log-likelihood of the chosen answer's tokens; 0: none."
    )

    @model_validator(mode="after")
    def _fits_objective(self) -> Self:
        if self.objective == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing is read by objective dpo only: remove it or set objective to dpo")
        return self
