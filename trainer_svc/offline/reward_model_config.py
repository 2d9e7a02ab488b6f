"""Settings of `sluice reward-model`. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from trainer_svc.offline.dpo_config import PAIRS
from trainer_svc.offline.settings import OfflineConfig

__all__ = ["RewardModelConfig"]


class RewardModelConfig(OfflineConfig):
    """Training a scorer on preferences (Bradley-Terry); the file is flat: its keys stand at the top level.

    What is written is a transformers sequence classifier with one label, its score at the last token.
    """

    data: str = Field("", description=PAIRS)
    output: Path = Field(Path("outputs/reward_model"), description="Model directory to write; must not exist.")
    centering: float = Field(
        0.0,
        ge=0,
        description="Weight of the squared sum of a pair's scores, which draws their mean to 0 (0.01 is usual); 0: none.",
    )
