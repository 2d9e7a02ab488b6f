"""LoRA by PEFT: low-rank factors beside the linear layers of a frozen model, and adapters as directories.

PEFT puts its layers into the transformers model in place, so that packed attention, sharding and readers of the trunk see the
same model as before. A separate `Adapter` knows what was added.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from sluice.chat_template import save_tokenizer
from sluice.host_files import whole_directory
from trainer_svc.compute_config import LoraConfig
from trainer_svc.engine.finite import UnfitWeightsError, some_of, unfit_weights
from trainer_svc.engine.network import OWN_MODULES, Network
from trainer_svc.engine.rounding import store_frozen
from trainer_svc.parallel.sharding import cpu_copy

if TYPE_CHECKING:
    from peft import PeftModel

NAME = "default"
"""PEFT's name of the only adapter. Files do not contain it."""

PREFIX = "base_model.model."
"""PEFT's prefix of the names of the base model."""

BASE_LAYER = ".base_layer"
"""PEFT's name of the layer that it wraps."""

TASKS = {"language": "CAUSAL_LM", "value": "SEQ_CLS", "both": "CAUSAL_LM"}
"""PEFT's task types, by what a network has on top. A classifier's head is trained and saved with its adapter."""


class UnmergeableError(Exception):
    """An adapter cannot be added to the weights of its base; the message says why."""


class Adapter:
    """The LoRA factors of a network."""

    def __init__(self, peft: PeftModel, config: LoraConfig) -> None:
        self.peft = peft
        self.config = config
        self._dropouts = [
            dropout for module in peft.modules() for dropout in getattr(module, "lora_dropout", {}).values()
        ]
        for dropout in self._dropouts:
            dropout.eval()

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Switch on the dropout in front of the factors. Outside of this block it is off, whatever mode the model is in."""
        try:
            for dropout in self._dropouts:
                dropout.train()
            yield
        finally:
            for dropout in self._dropouts:
                dropout.eval()

    @property
    def settings(self) -> dict[str, Any]:
        """The content of PEFT's ``adapter_config.json``."""
        found: dict[str, Any] = self.peft.peft_config[NAME].to_dict()
        return found | {"inference_mode": True}

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return the trained weights as whole CPU copies, named as in PEFT's files. All ranks gather sharded ones together.

        Args:
            dtype: Their precision; None keeps float32.
        """
        from peft import get_peft_model_state_dict  # noqa: PLC0415  the import takes seconds; only adapters need it

        named = self.peft.get_base_model().named_parameters()
        trained = {name: each.detach() for name, each in named if each.requires_grad}
        state: dict[str, torch.Tensor] = get_peft_model_state_dict(
            self.peft, _peft_state(dtype, trained), adapter_name=NAME, save_embedding_layers=False
        )
        return state

    def export(
        self,
        source: str,
        directory: Path,
        dtype: torch.dtype | None,
        weights: Mapping[str, torch.Tensor],
        chat_template: str | None = None,
    ) -> None:
        """Write a PEFT adapter with its tokenizer, or the merged model if `config.merges`; it appears whole or not at all.

        `weights` are the trained weights by their names in the model, `source` is the directory or hub id of the base model. If
        `dtype` is None, keep float32. If `chat_template` is None, keep the base model's.

        Raises:
            FileExistsError: if the directory exists.
        """
        if self.config.merges:
            with tempfile.TemporaryDirectory(prefix="sluice-adapter-") as parts:
                state = _peft_state(None, weights)
                self.peft.save_pretrained(parts, state_dict=state, save_embedding_layers=False)
                merge_adapter(source, parts, directory, dtype or torch.float32, chat_template)
            return
        with whole_directory(directory) as staging:
            self.peft.save_pretrained(staging, state_dict=_peft_state(dtype, weights), save_embedding_layers=False)
            save_tokenizer(source, staging, chat_template)

    def merged(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights with the adapter added, W + scale x B A, under the base model's names.

        Args:
            state: `state_dict` of the network's model; not changed. Sharded tensors stay sharded.
        """
        scales = {
            name: float(module.scaling[NAME])
            for name, module in self.peft.get_base_model().named_modules()
            if hasattr(module, "lora_A") and NAME in module.lora_A
        }
        merged: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            module, _, leaf = name.rpartition(".")
            owner = module.removesuffix(BASE_LAYER)
            if ".lora_" in name or ".original_module." in name:
                continue
            if owner in scales and leaf == "weight":
                up, down = (state[f"{owner}.lora_{side}.{NAME}.weight"].detach() for side in "BA")
                tensor = tensor.detach() + scales[owner] * (up @ down)  # noqa: PLW2901
            merged[f"{owner}.{leaf}".replace(f".modules_to_save.{NAME}", "")] = tensor
        return merged


def _peft_state(dtype: torch.dtype | None, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return CPU copies of trained weights under the names that PEFT's wrapper model gives them."""
    return {
        f"{PREFIX}{name}": cpu_copy(tensor, dtype)
        for name, tensor in weights.items()
        if not name.startswith(OWN_MODULES)
    }


def attach_adapter(network: Network, config: LoraConfig) -> tuple[Network, Adapter | None]:
    """Freeze a network and put trainable factors beside its linear layers; initially they change no output.

    The factors are drawn from PyTorch's generator: seed it first.

    Args:
        network: A whole network that is not laid out over processes yet.
        config: The settings. Rank 0 leaves the network unchanged.

    Raises:
        ValueError: if the settings name layers that the network lacks, or a precision that it does not compute in.
    """
    if config.rank == 0:
        return network, None
    import peft  # noqa: PLC0415  the import takes seconds; only training with an adapter needs it

    model = network.model
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_targets(network, config),
        task_type=TASKS[network.head],
    )
    with _as_if_read(_linear_layers(network).values()):
        wrapped = peft.get_peft_model(model, settings)
    _store_base(network, config)
    network = replace(network, files=network.files and network.files.renamed(_names_below_adapter(model)))
    if network.head == "both" and network.value_head is not None:
        network.value_head.requires_grad_(
            requires_grad=True
        )  # a module of training, which adapter files do not contain
    if network.head == "value":
        network = replace(network, value_head=model.score)
    return network, Adapter(wrapped, config)


def _linear_layers(network: Network) -> dict[str, torch.nn.Linear]:
    trunk = network.model.base_model
    return {name: module for name, module in trunk.named_modules() if isinstance(module, torch.nn.Linear)}


@contextmanager
def _as_if_read(layers: Iterable[torch.nn.Linear]) -> Iterator[None]:
    """Inside the block, give layers with unread weights placeholder weights on the CPU that take no memory.

    PEFT draws the factors on the device of the layer's weight, and on "meta" their values would be lost.
    """
    unread = [(layer, layer.weight) for layer in layers if layer.weight.is_meta]
    for layer, weight in unread:
        layer.weight = torch.nn.Parameter(torch.zeros(1, dtype=weight.dtype).expand(weight.shape))
    try:
        yield
    finally:
        for layer, weight in unread:
            layer.weight = weight.requires_grad_(layer.weight.requires_grad)


def _names_below_adapter(model: torch.nn.Module) -> dict[str, str]:
    """Return the present name of each parameter that PEFT wrapped, by its name before."""
    names = (name for name, _ in model.named_parameters(remove_duplicate=False) if BASE_LAYER in name)
    return {name.replace(BASE_LAYER, ""): name for name in names}


def _targets(network: Network, config: LoraConfig) -> list[str]:
    """Return the last parts of the names of the layers to adapt."""
    present = sorted({name.rpartition(".")[2] for name in _linear_layers(network)})
    strange = sorted(set(config.target_modules) - set(present))
    if strange:
        raise ValueError(
            f"lora.target_modules names {', '.join(strange)}, which are no linear layers of {type(network.model).__name__}'s "
            f"blocks; it has {', '.join(present)} (embeddings and output layers are not adapted: engines would not serve them)"
        )
    return list(config.target_modules) or present


def _store_base(network: Network, config: LoraConfig) -> None:
    """Store the frozen matrices in bfloat16, in which they are computed anyway: half the memory, the same results."""
    if config.base_dtype != "bfloat16":
        return
    if network.compute_dtype != torch.bfloat16:
        raise ValueError("lora.base_dtype is bfloat16, but the forward pass is float32: set dtype to bfloat16")
    store_frozen(network.model, torch.bfloat16)


def merge_adapter(
    base: str, adapter: str, directory: Path, dtype: torch.dtype, chat_template: str | None = None
) -> None:
    """Write the model that computes the same as base and adapter together; the factors are added in float32.

    Base and adapter are directories or hub ids. An adapter of a sequence classifier gives a classifier. If `chat_template` is None,
    keep the base's.

    Raises:
        FileExistsError: if the directory exists.
        ValueError: if there is no adapter, or it belongs to another base.
        UnmergeableError: if no weights compute what base and adapter do.
        UnfitWeightsError: if merged weights are not finite; nothing is written then.
    """
    # The import takes seconds; only merging needs it.
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, load_peft_weights  # noqa: PLC0415

    with whole_directory(directory) as staging:
        try:
            config = PeftConfig.from_pretrained(adapter)
        except KeyError as error:
            raise ValueError(f"PEFT does not know the kind of adapter {adapter}: {error}") from error
        if config.task_type == "SEQ_CLS":
            model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, num_labels=1)
        else:
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing names, which are compared below
            given = set(load_peft_weights(adapter, device="cpu"))
            _untie(model, given)
            try:
                wrapped = PeftModel.from_pretrained(model, adapter)
            except RuntimeError as error:  # shapes that do not fit
                raise ValueError(f"the adapter does not belong to this base ({_mismatch(error)})") from error
        _check_names(given, set(get_peft_model_state_dict(wrapped)))
        try:
            merged = wrapped.merge_and_unload()
        except (NotImplementedError, RuntimeError) as error:
            raise UnmergeableError(f"PEFT has no merged form of it: {error}") from error
        if names := unfit_weights(merged.named_parameters(), dtype):
            raise UnfitWeightsError(
                f"weights of the merged model are not finite in {str(dtype).removeprefix('torch.')}, or too large to compute with:"
                f" {some_of(names)}"
            )
        merged.to(dtype).save_pretrained(staging)
        save_tokenizer(base, staging, chat_template)


def _untie(model: Any, given: set[str]) -> None:  # noqa: ANN401 - a model of transformers
    """If embedding and head share a weight, and the adapter has factors beside one of them, give the head a weight of its own.

    PEFT adds the factors to the output of that layer only, not to the other layer's output.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return
    names = tuple(f"{PREFIX}{name}.lora_" for name, module in model.named_modules() if module in (head, embeddings))
    if any(each.startswith(names) for each in given):
        head.weight = torch.nn.Parameter(embeddings.weight.detach().clone())
        model.config.tie_word_embeddings = False


def _check_names(given: set[str], wanted: set[str]) -> None:
    """Refuse factors without a layer in the base, which PEFT ignores, and layers without factors, for which PEFT draws random ones."""
    lacking, foreign = (
        sorted(name for name in names if ".lora_" in name) for names in (wanted - given, given - wanted)
    )
    if lacking:
        raise ValueError(f"the adapter does not belong to this base (it lacks {lacking[0]}, whose layer the base has)")
    if foreign:
        raise ValueError(f"the adapter does not belong to this base (it has {foreign[0]}, whose layer the base lacks)")


def _mismatch(error: RuntimeError) -> str:
    """Return the first mismatch. PyTorch lists them below a heading, one per line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line.rstrip(".") for line in lines if line.startswith("size mismatch")), lines[0])
