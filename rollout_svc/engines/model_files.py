"""The files of the base model: where they are, and which tensors a complete version of the model has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from rollout_svc.engines.base import EngineError
from weightsync.staged import StagedVersion

TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The tensors of the base model on disk.

    Attributes:
        paths: Its safetensors files, one or several shards.
        shapes: Shape of every tensor that a version must hold, by Hugging Face name; a tied output layer is left out.
    """

    paths: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def check(self, staged: StagedVersion) -> None:
        """Compare a staged version with the model. A tied output layer may be present or not.

        Raises:
            EngineError: if tensors are missing, unknown or of another shape.
        """
        given = {name: spec.shape for name, spec in staged.tensors.items() if name in self.shapes or name != TIED_HEAD}
        missing, unknown = sorted(self.shapes.keys() - given.keys()), sorted(given.keys() - self.shapes.keys())
        if missing or unknown:
            raise EngineError(
                f"version {staged.version} does not fit the model: missing {missing[:3]} ({len(missing)}), "
                f"unknown {unknown[:3]} ({len(unknown)}); push every tensor of the base model under its own name"
            )
        for name, shape in given.items():
            if tuple(shape) != self.shapes[name]:
                raise EngineError(
                    f"version {staged.version} does not fit the model: {name} is {list(shape)}, not {list(self.shapes[name])}"
                )


def read_base_model(directory: Path) -> BaseModel:
    """Read names and shapes from the headers of a model's files.

    Raises:
        EngineError: if there are no safetensors files, or one cannot be read.
    """
    paths = tuple(sorted(directory.glob("*.safetensors")))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        paths = tuple(sorted(directory / name for name in names))
    elif (directory / "model.safetensors").is_file():
        paths = (directory / "model.safetensors",)
    if not paths:
        raise EngineError(f"{directory} has no safetensors files; convert the model with save_pretrained")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise EngineError(f"cannot read {path}: {error}") from error
    if is_tied(directory):
        shapes.pop(TIED_HEAD, None)
    return BaseModel(paths, shapes)


def model_directory(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model. The files of a hub id are downloaded unless they are in the cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for hub ids

    return Path(
        snapshot_download(
            model, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
        )
    )


def is_tied(directory: Path) -> bool:
    """Return whether the output layer shares the weights of the embedding, by the configuration."""
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config") or config
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def check_length(model: str, asked: int, longest: int) -> None:
    """Refuse a context that is longer than the model supports.

    Raises:
        ValueError: with the maximum.
    """
    if asked > longest:
        raise ValueError(f"max_model_len is {asked}, but {model} was made for {longest} positions: lower it")
