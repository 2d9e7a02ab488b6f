"""Whether the directory of a model is whole: found by names and headers, before its weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path

from sluice.config.errors import ConfigError, reason_of

__all__ = ["check_files"]

WEIGHTS = ("*.safetensors", "*.bin")
"""Files of a model's weights."""

TOKENIZERS = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""Files that hold a vocabulary, as the tokenizers of transformers name them."""

INDEX = "model.safetensors.index.json"
"""Names the shards of weights that are in several files."""


def check_files(model: str, setting: str = "model", *, tokenizer: bool = True) -> None:
    """Refuse a directory that holds a model's configuration but no whole weights, or no tokenizer; a hub id is taken.

    Args:
        model: What the setting names.
        setting: Its name, for the message.
        tokenizer: Whether its tokenizer is read.

    Raises:
        ConfigError: with what is missing or damaged.
    """
    path = Path(model).resolve()
    if not path.is_dir():
        return
    needed = {"weights": WEIGHTS} | ({"tokenizer": TOKENIZERS} if tokenizer else {})
    for what, patterns in needed.items():
        if not any(any(path.glob(pattern)) for pattern in patterns):
            raise ConfigError(
                f"{setting}: {path} holds no {what} ({', '.join(patterns)}): give the directory of a whole model, as"
                " save_pretrained of model and tokenizer writes it"
            )
    _check_weights(path, setting)


def _check_weights(path: Path, setting: str) -> None:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  what only looks at settings need not have it

    shards = set(path.glob("*.safetensors"))
    index = path / INDEX
    try:
        if index.is_file():
            shards |= {path / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        for shard in sorted(shards):
            with safe_open(shard, framework="numpy"):  # reads the header, and compares it with the length
                pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(
            f"{setting}: the weights in {path} are not whole ({reason_of(error)}): copy or download them again (with git, by"
            " `git lfs pull`)"
        ) from error
