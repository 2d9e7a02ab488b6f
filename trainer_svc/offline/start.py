"""How each kind of offline training begins: an output that is free, a tokenizer, examples, an engine."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sluice.config import ConfigError, reason_of
from sluice.render import ChatRenderer
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.network import Head
from trainer_svc.offline.examples import Data, Examples, hold_out
from trainer_svc.offline.output import make_parent
from trainer_svc.offline.resuming import checkpoint_directory
from trainer_svc.offline.settings import OfflineConfig
from trainer_svc.parallel.mesh import SINGLE, Mesh

__all__ = ["Load", "Loaded", "build_engine", "load_examples", "renderer_of", "tokenizer_of"]


class Loaded(Examples, Protocol):
    """Examples as read from files."""

    @property
    def dropped_long(self) -> int:
        """Examples left out as too long."""
        ...


class Load(Protocol):
    """Reads one kind of examples."""

    def __call__(self, data: str, split: str, renderer: ChatRenderer, *, max_length: int, drop_long: bool) -> Loaded:
        """Read and render all rows; `DataError` if they cannot be used."""
        ...


def renderer_of(config: OfflineConfig) -> ChatRenderer:
    """The renderer of the model's tokenizer.

    Raises:
        FileExistsError: if the output directory exists, or checkpoints for it that are not to be resumed: found before
            anything else is done.
        ConfigError: if the directory above it cannot be made, or the model has no tokenizer that loads.
    """
    checkpoints = checkpoint_directory(config.output)
    if checkpoints.exists() and not config.resume:
        raise FileExistsError(
            f"{checkpoints} holds checkpoints of a run that did not end: give --resume to go on, or remove it"
        )
    if config.output.exists():
        raise FileExistsError(f"{config.output} exists: remove it or set output to another directory")
    make_parent(config.output)
    return ChatRenderer(tokenizer_of(config.model, "model"))


def tokenizer_of(model: str, setting: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Args:
        model: A directory or hub id.
        setting: What names it, for the message.

    Raises:
        ConfigError: if it has none that loads.
    """
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: {model}, a directory here or a hub id, gives no tokenizer: {reason_of(error)}"
        ) from error


def load_examples(config: OfflineConfig, load: Load, renderer: ChatRenderer) -> Data:
    """The examples that the settings name, those to train on and those held out.

    Args:
        config: The settings.
        load: Reads one kind of examples.
        renderer: Renders them.

    Raises:
        DataError: if they cannot be used.
    """
    read = partial(load, renderer=renderer, max_length=config.max_length, drop_long=config.on_long == "drop")
    data = read(config.data, config.split)
    if config.eval_data:
        held_out = read(config.eval_data, config.eval_split)
        return Data(data, held_out, data.dropped_long)
    return Data(*hold_out(data, config.eval_share, config.seed), data.dropped_long)


def build_engine(
    config: OfflineConfig, model: str = "", *, head: Head = "language", mesh: Mesh = SINGLE
) -> TrainEngine:
    """The engine of this process.

    Args:
        config: The settings, with the number of steps filled in.
        model: Directory or hub id to load; empty for the model to start from.
        head: What the network has on top.
        mesh: The processes that train together.

    Raises:
        ConfigError: if the model does not load, or the settings do not fit it, the device or the processes.
    """
    try:
        return TrainEngine(config, model or config.model, config.seed, head=head, mesh=mesh)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot load the model {model or config.model}: {reason_of(error)}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except RuntimeError as error:
        if "mismatched_sizes" not in str(error):
            raise
        raise ConfigError(
            f"cannot load the model {model or config.model}: its weights have other shapes than its config.json says: give the"
            " directory of a whole model"
        ) from error
