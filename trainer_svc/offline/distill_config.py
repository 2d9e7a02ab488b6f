"""Settings of `sluice distill`. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from trainer_svc.offline.settings import OfflineConfig

__all__ = ["DistillConfig"]


class DistillConfig(OfflineConfig):
    """Learning from a teacher on given texts; the file is flat: its keys stand at the top level.

    The teacher's log-probabilities of the texts are computed once, before the first step; both models have one vocabulary.
    """

    data: str = Field(
        "",
        description="Texts, as rows of `sluice sft`: sampled from the teacher (`divergence = forward`) or from the model to start from "
        "(`divergence = reverse`).",
    )
    output: Path = Field(Path("outputs/distill"), description="Model directory to write; must not exist.")
    teacher: str = Field("", description="The model to learn from: a Hugging Face directory or hub id.")
    divergence: Literal["forward", "reverse"] = Field(
        "forward",
        description="forward: negative log-likelihood of the teacher's texts, whose gradient is that of KL(teacher || model); "
        "reverse: on the model's own texts, the gradient of KL(model || teacher).",
    )

    @model_validator(mode="after")
    def _has_teacher(self) -> Self:
        if not self.teacher:
            raise ValueError("teacher is not set: give --teacher, or teacher = ... in the file")
        return self
