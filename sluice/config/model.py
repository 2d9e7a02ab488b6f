"""Whether the model that the settings name can be one at all, found before anything is started."""

from __future__ import annotations

import re
from pathlib import Path

from sluice.config.errors import ConfigError

__all__ = ["check_model"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_model(model: str, setting: str = "model") -> None:
    """Refuse what is neither a directory with a model nor the form of a hub id; the hub is not asked.

    Args:
        model: What the setting names.
        setting: Its name, for the message.

    Raises:
        ConfigError: with what is wrong.
    """
    if not model:
        raise ConfigError(
            f'{setting} is not set: give --{setting} DIRECTORY (or a hub id), or {setting} = "..." in the file'
        )
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{setting}: {path.resolve()} holds no Hugging Face model: it has no config.json")
    elif not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"{setting}: there is no directory {path.resolve()}, and {model!r} is no hub id such as Qwen/Qwen3-0.6B"
        )
