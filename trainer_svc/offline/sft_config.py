"""Settings of `sluice sft`. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from trainer_svc.offline.settings import OfflineConfig

__all__ = ["SftConfig"]


class SftConfig(OfflineConfig):
    """Supervised fine-tuning; the file is flat: its keys stand at the top level."""

    data: str = Field(
        "",
        description="Demonstrations: a JSONL file, a dataset directory or a hub dataset id, with rows of `messages`, or of `prompt` and "
        "`completion` (texts are joined as they are; lists of messages are rendered as a chat).",
    )
    output: Path = Field(Path("outputs/sft"), description="Model directory to write; must not exist.")
