"""Whether the model that the settings name can be one at all, and of which sizes, found before anything is started."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sluice.config.errors import ConfigError

__all__ = ["ModelSizes", "check_model", "sizes_on_disk"]

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


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a language model; None where its configuration leaves one to the architecture.

    Attributes:
        model_type: Name of the architecture; empty where none is given.
        layers: Decoder layers.
        heads: Attention heads of a layer.
        key_heads: Key-value heads of a layer.
        inner: Columns of the MLP.
        positions: Longest sequence that it was made for, in tokens.
    """

    model_type: str
    layers: int | None
    heads: int | None
    key_heads: int | None
    inner: int | None
    positions: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The sizes in the configuration of a text model, as transformers names them."""

        def size(name: str) -> int | None:
            value = config.get(name)
            return value if isinstance(value, int) and value > 0 else None

        return cls(
            model_type=str(config.get("model_type") or ""),
            layers=size("num_hidden_layers"),
            heads=size("num_attention_heads"),
            key_heads=size("num_key_value_heads"),
            inner=size("intermediate_size"),
            positions=size("max_position_embeddings"),
        )


def sizes_on_disk(model: str, setting: str = "model") -> ModelSizes | None:
    """The sizes that the directory of a model names; None for a hub id, which is not asked for.

    Args:
        model: What the setting names.
        setting: Its name, for the message.

    Raises:
        ConfigError: if its config.json cannot be read.
    """
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: cannot read {path} ({error}): give the directory of a whole model") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{setting}: {path} holds no JSON object: give the directory of a Hugging Face model")
    text = config.get("text_config")
    return ModelSizes.of(text if isinstance(text, dict) else config)
