"""The files of the base model: their place, and the tensors of a complete version of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from safetensors import safe_open

from rollout_svc.engines.base import EngineSettingsError, UnfitVersionError
from weightsync.staged import StagedVersion

TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
"""The weight that a tied output layer shares."""

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "embeddings.weight")
"""Ends of the names of embeddings in all architectures."""

_NO_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|(^|\.)mtp\.")
"""Tensors that files may hold besides the weights: buffers that libraries compute themselves (frequencies, masks), and heads that predict
further tokens, which are not trained. No version has them."""

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The tensors of the base model on disk.

    Attributes:
        paths: Its safetensors files, one or several shards.
        shapes: Shape of every tensor that a version must hold, by Hugging Face name; a tied output layer is left out.
        in_files: Names of all tensors in the files, without a tied output layer that is stored beside its embedding.
        renamed: Names that versions use, by name in the files, for tensors whose names differ.
    """

    paths: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]
    in_files: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def check(self, staged: StagedVersion) -> None:
        """Compare a staged version with the model. A tied output layer may be present or not.

        Raises:
            UnfitVersionError: if tensors are missing, unknown or of another shape.
        """
        given = {name: spec.shape for name, spec in staged.tensors.items() if name in self.shapes or name != TIED_HEAD}
        missing, unknown = sorted(self.shapes.keys() - given.keys()), sorted(given.keys() - self.shapes.keys())
        if missing or unknown:
            raise UnfitVersionError(
                f"version {staged.version} does not fit the model: missing {missing[:3]} ({len(missing)}), "
                f"unknown {unknown[:3]} ({len(unknown)}); push every tensor of the base model under its own name"
            )
        for name, shape in given.items():
            if tuple(shape) != self.shapes[name]:
                raise UnfitVersionError(
                    f"version {staged.version} does not fit the model: {name} is {list(shape)}, not {list(self.shapes[name])}"
                )

    def known_to(self, live: Collection[str], weights: Collection[str]) -> Self:
        """Return the base model without the tensors of the files that the loaded model does not have.

        Args:
            live: Names of all tensors of the loaded model.
            weights: Names of its weights, tied ones once.

        Raises:
            EngineSettingsError: if weights are missing in the files. Then the other names may mean something else, too.
        """
        foreign, lacking = sorted(self.shapes.keys() - live), sorted(set(weights) - self.shapes.keys())
        if foreign and lacking:
            raise EngineSettingsError(
                f"the model's files have tensors that the loaded model does not name so: {foreign[:3]} ({len(foreign)}), and lack"
                f' {lacking[:3]} ({len(lacking)}); use engine = "vllm"'
            )
        return replace(self, shapes={name: shape for name, shape in self.shapes.items() if name in live})


def read_base_model(directory: Path) -> BaseModel:
    """Read names and shapes from the headers of a model's files.

    Raises:
        EngineSettingsError: if there are no safetensors files, or one cannot be read.
    """
    paths = tuple(sorted(directory.glob("*.safetensors")))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        paths = tuple(sorted(directory / name for name in names))
    elif (directory / "model.safetensors").is_file():
        paths = (directory / "model.safetensors",)
    if not paths:
        raise EngineSettingsError(f"{directory} has no safetensors files; convert the model with save_pretrained")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise EngineSettingsError(f"cannot read {path}: {error}") from error
    renamed: dict[str, str] = {}
    if is_tied(directory) and TIED_HEAD in shapes:
        if any(name.endswith(_EMBEDDINGS) for name in shapes):
            del shapes[TIED_HEAD]
        else:
            renamed[TIED_HEAD] = EMBEDDING  # the one weight of both, stored under the name of the output layer
    layers = _text_config(directory).get("num_hidden_layers")
    needed = {renamed.get(name, name): shape for name, shape in shapes.items() if _is_weight(name, layers)}
    return BaseModel(paths, needed, frozenset(shapes), renamed)


def _is_weight(name: str, layers: object) -> bool:
    """Return whether a tensor belongs to the trained model. `layers` is the model's number of layers, if known."""
    beyond = _LAYER.match(name)
    return not _NO_WEIGHTS.search(name) and not (beyond and isinstance(layers, int) and int(beyond[1]) >= layers)


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
    """Return whether the output layer shares the weights of the embedding, according to the configuration."""
    text = _text_config(directory)
    return bool(_config(directory).get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def _config(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def _text_config(directory: Path) -> dict[str, Any]:
    config = _config(directory)
    text: dict[str, Any] = config.get("text_config") or config
    return text


def check_length(model: str, asked: int, longest: int) -> None:
    """Refuse a context that is longer than the model supports.

    Raises:
        ValueError: with the maximum.
    """
    if asked > longest:
        raise ValueError(f"max_model_len is {asked}, but {model} was made for {longest} positions: lower it")
