"""LoRA by PEFT: low-rank factors beside the linear layers of a frozen model.

PEFT puts its layers into the transformers model in place. The model stays what it was for packed attention, for sharding and
for whoever asks for its trunk; beside it an `Adapter` knows what was added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from trainer_svc.compute_config import LoraConfig
from trainer_svc.engine.export import OWN_MODULES
from trainer_svc.engine.network import Network

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["Adapter", "attach_adapter"]

NAME = "default"
"""PEFT's name of the only adapter; its files do not have it."""

PREFIX = "base_model.model."
"""What PEFT puts before the names of the base model."""

BASE_LAYER = ".base_layer"
"""Where PEFT keeps the layer that it wraps."""

TASKS = {"language": "CAUSAL_LM", "value": "SEQ_CLS", "both": "CAUSAL_LM"}
"""What a network has on top, as PEFT calls it; the head of a classifier is trained and saved with its adapter."""


class Adapter:
    """The LoRA factors of a network.

    Args:
        peft: PEFT's model around the network's.
        config: The settings.
    """

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
        """Let the dropout in front of the factors act; outside of this it does nothing, whatever else is switched."""
        try:
            for dropout in self._dropouts:
                dropout.train()
            yield
        finally:
            for dropout in self._dropouts:
                dropout.eval()

    @property
    def settings(self) -> dict[str, Any]:
        """What PEFT writes into ``adapter_config.json``."""
        found: dict[str, Any] = self.peft.peft_config[NAME].to_dict()
        return found | {"inference_mode": True}

    def tensors(
        self, dtype: torch.dtype | None = None, weights: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """The trained weights as PEFT names them in its files, whole, as CPU copies; sharded ones are gathered by all ranks.

        Args:
            dtype: Their precision; None keeps float32.
            weights: Weights by their names in the model; None: those that it has now.
        """
        from peft import get_peft_model_state_dict  # noqa: PLC0415  seconds of import that others do not need

        named: dict[str, torch.Tensor] = get_peft_model_state_dict(
            self.peft, self._state(dtype, weights), adapter_name=NAME, save_embedding_layers=False
        )
        return named

    def save(
        self, directory: Path, dtype: torch.dtype | None = None, weights: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json`` as PEFT does; arguments as of `tensors`."""
        self.peft.save_pretrained(directory, state_dict=self._state(dtype, weights), save_embedding_layers=False)

    def merged(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of a model without an adapter that computes the same: W + scale x B A, under the base model's names.

        Args:
            state: `state_dict` of the network's model; not changed. Sharded tensors give sharded ones.
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

    def _state(self, dtype: torch.dtype | None, weights: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Trained weights under the names that PEFT's model around ours gives them."""
        if weights is None:
            named = self.peft.get_base_model().named_parameters()
            weights = {name: each.detach() for name, each in named if each.requires_grad}
        return {
            f"{PREFIX}{name}": _whole(tensor).to("cpu", dtype or tensor.dtype, copy=True)
            for name, tensor in weights.items()
            if not name.startswith(OWN_MODULES)
        }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def attach_adapter(network: Network, config: LoraConfig) -> tuple[Network, Adapter | None]:
    """Freeze a network and put trainable factors beside its linear layers; at the start they change nothing.

    The factors are drawn from PyTorch's generator; seed it before.

    Args:
        network: A whole network, not yet cut over processes.
        config: The settings; rank 0 leaves the network as it is.

    Raises:
        ValueError: if the settings name layers that the network does not have, or a precision that it does not compute in.
    """
    if config.rank == 0:
        return network, None
    import peft  # noqa: PLC0415  seconds of import that training without it does not need

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
        network.value_head.requires_grad_(requires_grad=True)  # training's own module, which no adapter file holds
    if network.head == "value":
        network = replace(network, value_head=model.score)
    return network, Adapter(wrapped, config)


def _linear_layers(network: Network) -> dict[str, torch.nn.Linear]:
    trunk = network.model.base_model
    return {name: module for name, module in trunk.named_modules() if isinstance(module, torch.nn.Linear)}


@contextmanager
def _as_if_read(layers: Iterable[torch.nn.Linear]) -> Iterator[None]:
    """Give layers whose weights are not read yet weights that take no memory, on the CPU.

    PEFT puts the factors that it draws on the device of the weight beside them, and on "meta" they would be lost.
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
    """The names of parameters now, by those that they had before PEFT wrapped their layers."""
    names = (name for name, _ in model.named_parameters(remove_duplicate=False) if BASE_LAYER in name)
    return {name.replace(BASE_LAYER, ""): name for name in names}


def _targets(network: Network, config: LoraConfig) -> list[str]:
    """The names of the layers to adapt, as their last parts.

    Raises:
        ValueError: if the trunk has no linear layer of a name.
    """
    present = sorted({name.rpartition(".")[2] for name in _linear_layers(network)})
    strange = sorted(set(config.target_modules) - set(present))
    if strange:
        raise ValueError(
            f"lora.target_modules names {', '.join(strange)}, which are no linear layers of {type(network.model).__name__}'s "
            f"blocks; it has {', '.join(present)} (embeddings and output layers are not adapted: engines would not serve them)"
        )
    return list(config.target_modules) or present


def _store_base(network: Network, config: LoraConfig) -> None:
    """Keep the frozen linear layers in the precision that they are computed in: half the memory, the same results."""
    if config.base_dtype != "bfloat16":
        return
    if network.compute_dtype != torch.bfloat16:
        raise ValueError("lora.base_dtype is bfloat16, but the forward pass is float32: set dtype to bfloat16")
    for module in _linear_layers(network).values():
        if not module.weight.requires_grad:
            module.to(torch.bfloat16)
