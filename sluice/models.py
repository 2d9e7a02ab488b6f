"""Checks, before anything is loaded, that the model, dataset or module that a setting names exists and is complete.

A directory is checked by the names and headers of its files. Any other name is the id of a model on the Hugging Face hub. The hub is
asked once, with a short timeout, because the libraries that load models retry each file for half a minute before they report that
there is no such model or no network.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn, Self

from sluice.errors import ConfigError, reason_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

WEIGHTS = ("*.safetensors", "*.bin")
"""Files of a model's weights."""

TOKENIZERS = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""Files that hold a vocabulary, as the tokenizers of transformers name them."""

_PART = re.compile(r"-\d+-of-\d+\.safetensors$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")

ADAPTER_SETTINGS = "adapter_config.json"
"""File that PEFT writes next to an adapter. A directory with only an adapter has no weights of a model."""

INDEX = "model.safetensors.index.json"
"""File that lists the files of weights that are split."""


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names by which configurations give the number of experts of a layer."""


def check_model(model: str, setting: str = "model") -> None:
    """Refuse a name that is neither a directory with a model nor has the form of a hub id. The hub is not asked.

    Raises:
        ConfigError: with the reason and the remedy.
    """
    if not model:
        raise ConfigError(
            f'{setting} is not set: give --{setting} DIRECTORY (or a hub id), or {setting} = "..." in the file'
        )
    path = Path(model)
    if path.is_dir():
        if (path / ADAPTER_SETTINGS).is_file() and not any(path.glob("model*.safetensors")):
            raise ConfigError(
                f"{setting}: {path.resolve()} holds an adapter, not a model: merge it into its base first"
                f" (sluice merge-adapter --adapter {model} --output DIRECTORY), and name that directory"
            )
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{setting}: {path.resolve()} holds no Hugging Face model: it has no config.json; name the directory of a model"
                " (`sluice fetch-model` downloads one)"
            )
    elif not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"{setting}: there is no directory {path.resolve()}, and {model!r} is not a hub id such as Qwen/Qwen3-0.6B"
        )


def check_files(model: str, setting: str = "model", *, tokenizer: bool = True) -> None:
    """Refuse a directory whose weights do not fit its configuration, or that has no tokenizer although one is needed.

    Every hub id is accepted. Weights in other formats than safetensors are not examined.

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
                f"{setting}: {path} holds no {what} ({', '.join(patterns)}): give the directory of a complete model, as"
                " save_pretrained of model and tokenizer writes it"
            )
    _check_weights(path, setting)


def _check_weights(path: Path, setting: str) -> None:
    from safetensors import SafetensorError  # noqa: PLC0415  not needed to look at settings

    index = path / INDEX
    shards = set(path.glob("*.safetensors"))
    parts = sorted(each.name for each in shards if _PART.search(each.name))
    if parts and not index.is_file() and not (path / "model.safetensors").is_file():
        raise ConfigError(
            f"{setting}: {path} holds {parts[0]} and no {INDEX}, which says what is in which file: copy or download it too"
        )
    try:
        if index.is_file():
            used = {path / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        else:
            used = {path / "model.safetensors"} & shards
        headers = {shard: _shapes(shard) for shard in sorted(shards | used)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(
            f"{setting}: the weights in {path} are incomplete ({reason_of(error)}): copy or download them again (with git:"
            " `git lfs pull`)"
        ) from error
    config = config_on_disk(str(path), setting)
    if config is not None:
        _check_shapes({name: shape for each in used for name, shape in headers[each].items()}, config, path, setting)


def _shapes(file: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors of a safetensors file, by name. Only the header is read, and compared with the file's size."""
    from safetensors import safe_open  # noqa: PLC0415  as above

    with safe_open(file, framework="numpy") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118  no dictionary


def _check_shapes(shapes: Mapping[str, list[int]], config: Mapping[str, Any], path: Path, setting: str) -> None:
    """Refuse weights whose names and shapes show that they belong to another model than the configuration. Nothing is loaded.

    Raises:
        ConfigError: with the tensor and the setting that contradict each other.
    """

    def refuse(what: str) -> NoReturn:
        raise ConfigError(
            f"{setting}: the weights in {path} are not those of its config.json: {what}; copy or download the directory again"
        )

    sizes = ModelSizes.of(config)
    layers = 1 + max((int(found[1]) for found in map(_LAYER.search, shapes) if found), default=-1)
    if layers and sizes.layers is not None and layers < sizes.layers:
        refuse(f"num_hidden_layers is {sizes.layers}, and the files have {layers}")
    wanted = [config.get("vocab_size"), config.get("hidden_size")]
    for name, shape in shapes.items():
        if name.endswith("embed_tokens.weight") and all(isinstance(each, int) for each in wanted) and shape != wanted:
            refuse(f"{name} is {shape}, and vocab_size and hidden_size are {wanted}")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a language model. None: the configuration leaves that size to the architecture.

    Attributes:
        model_type: Name of the architecture; empty if none is given.
        layers: Decoder layers.
        heads: Attention heads of a layer.
        key_heads: Key-value heads of a layer.
        inner: Columns of the MLP.
        positions: Longest sequence that it was made for, in tokens.
        experts: Experts of a layer that each token chooses from; None in a dense model.
    """

    model_type: str
    layers: int | None
    heads: int | None
    key_heads: int | None
    inner: int | None
    positions: int | None
    experts: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the sizes from the configuration of a text model."""

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
            # The configuration of a dense Doge model has a number of experts, too.
            experts=None if config.get("is_moe") is False else next(filter(None, map(size, EXPERTS)), None),
        )


def sizes_on_disk(model: str, setting: str = "model") -> ModelSizes | None:
    """Return the sizes of a model in a directory; see `config_on_disk`."""
    config = config_on_disk(model, setting)
    return None if config is None else ModelSizes.of(config)


def config_on_disk(model: str, setting: str = "model") -> dict[str, Any] | None:
    """Return the configuration of the text model in a directory; None for a hub id. The hub is not asked.

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
    return text if isinstance(text, dict) else config


def check_hub(model: str, setting: str = "model") -> None:
    """Refuse a model that the hub does not have, and any model if the hub cannot be reached. Accept a directory or a cached model.

    This makes one request of at most `HF_HUB_ETAG_TIMEOUT` seconds (10). If the hub is only busy, the model is accepted: the libraries
    that load it retry.

    Raises:
        ConfigError: with the answer of the hub, and the remedy.
    """
    if Path(model).is_dir():
        return
    # Half a second of import that directories do not need.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError  # noqa: PLC0415

    try:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return
        _ask(model, setting, "model", "config.json")
    except HFValidationError as error:
        raise ConfigError(f"{setting}: {model!r} is neither a directory nor a hub id: {reason_of(error)}") from error
    except EntryNotFoundError as error:
        raise ConfigError(
            f"{setting}: {model} has no config.json on the hub: name a model that transformers can load"
        ) from error


def check_hub_dataset(name: str, setting: str = "data") -> None:
    """Refuse a dataset that the hub does not have, and any dataset if the hub cannot be reached; see `check_hub`.

    Raises:
        ConfigError: with the answer of the hub, and the remedy.
    """
    from datasets.config import HF_DATASETS_CACHE  # noqa: PLC0415  as above
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError  # noqa: PLC0415

    if Path(name).exists() or (Path(HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir():
        return
    try:
        _ask(name, setting, "dataset", "README.md")
    except HFValidationError as error:
        raise ConfigError(f"{setting}: {name!r} is neither a directory nor a hub id: {reason_of(error)}") from error
    except EntryNotFoundError:  # the dataset exists, without a README
        return


def _ask(name: str, setting: str, kind: str, file: str) -> None:
    """Ask the hub once whether it has a file. Raise EntryNotFoundError if the model or dataset exists, but not the file."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url  # noqa: PLC0415
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # noqa: PLC0415  HTTPError of its HTTP library
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        RepositoryNotFoundError,
    )

    absent = f"{setting}: {name} is neither a directory here nor in the cache, and"
    if constants.is_offline_mode():
        raise ConfigError(f"{absent} HF_HUB_OFFLINE is set: unset it, or name a directory")
    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except GatedRepoError as error:
        raise ConfigError(
            f"{setting}: {name} is gated: request access on its page, and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{setting}: {name} is not a directory here, and the hub has no such {kind}, or it is private: correct the name, or"
            " log in with `hf auth login`"
        ) from error
    except EntryNotFoundError:
        raise
    except HfHubHTTPError:
        return
    except HTTPError as error:
        raise ConfigError(
            f"{absent} {constants.ENDPOINT} cannot be reached ({reason_of(error)}): check the network, or name a directory"
        ) from error


def importable(module: str) -> bool:
    """Return whether the package of a dotted name is installed, on PYTHONPATH, or in the working directory of the services."""
    package = module.partition(".")[0]
    if not package.isidentifier():
        return False
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # it was imported without a finder, such as `__main__`
        return True
    return found is not None or PathFinder.find_spec(package, [str(Path.cwd())]) is not None
