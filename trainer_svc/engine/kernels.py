"""Which kernels a network's layers run on: those of attention, and compiled ones for the rest."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from trainer_svc.engine.network import Network
from trainer_svc.engine.varlen_attention import Attention, uses_varlen

__all__ = ["choose_kernels", "compile_layers"]


def choose_kernels(network: Network, attention: Attention, *, compiled: bool) -> Network:
    """Settle how a network computes, once it lies where it stays.

    Args:
        network: Its decoder layers are compiled in place; the first pass of each kind takes the compiler's time.
        attention: auto, sdpa (stock kernels over blocks of similar length) or varlen (the flash kernel of CUDA).
        compiled: Whether `torch.compile` makes kernels for the decoder layers, for any number of tokens. Attention is
            left as it is.

    Raises:
        ValueError: if the device has no varlen kernel and it is asked for, or the model names no decoder layers.
    """
    config = network.model.config.get_text_config()
    heads = int(config.num_attention_heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    if compiled:
        compile_layers(network.model)
    varlen = uses_varlen(attention, network.device, network.compute_dtype, (heads, key_heads, head_dim))
    return replace(network, varlen=varlen)


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Have `torch.compile` make kernels for each decoder layer when it first runs, in place and for any number of tokens.

    Raises:
        ValueError: if the model names no decoder layers.
    """
    names = set(model._no_split_modules or ())  # noqa: SLF001 - transformers' own list of decoder layers, as for FSDP
    layers = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
    if not layers:
        raise ValueError(f"{type(model).__name__} names no decoder layers to compile: set compile to false")
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
