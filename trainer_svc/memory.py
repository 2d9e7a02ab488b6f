"""Estimate the memory of a training step on one device from the settings and the model's sizes. Pure; imports no torch.

The estimate is for dense decoders with gated MLPs, such as Llama and Qwen3, and for the rank that needs most memory. It counts:

* weights: 4 bytes per parameter; 4 or 2 in a frozen base;
* gradients: 4 bytes per trained parameter; `accumulate = whole` adds the unsharded gradients of the rank's layers;
* moments: AdamW 8 bytes per trained parameter, Muon 4; none on the device with `optimizer_offload`;
* copies: weights in the precision of the forward pass: bfloat16 copies on one device, gathered layers on several;
* activations: what autograd keeps of each layer (with `gradient_checkpointing` its input only), and one layer's work;
* other models: a reference and a teacher, and a critic with a model of its own;
* logits: `logit_cells` of 4 bytes, and the gradient of the output layer while it is computed.

It does not count the allocator's fragmentation, CUDA's own memory (about 1 GB) and communication buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from sluice.config.footprint import GIB
from sluice.decoder import Decoder
from trainer_svc.compute_config import ComputeConfig, ParallelDims, on_device

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a float32 and of a bfloat16 number."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by use at the peak of a step, on the device that needs most."""

    weights: int
    other_models: int
    gradients: int
    moments: int
    copies: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Bytes of all uses."""
        return sum(getattr(self, each.name) for each in fields(self))

    def __str__(self) -> str:
        """Return the uses in GiB, the largest first."""
        held = sorted(((getattr(self, each.name), each.name) for each in fields(self)), reverse=True)
        return ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for size, name in held if size)


def estimate(
    model: Decoder,
    config: ComputeConfig,
    *,
    device: str = "cuda",
    processes: int = 1,
    frozen: Iterable[tuple[Decoder, int]] = (),
    critic: Decoder | None = None,
) -> Memory:
    """Return the memory that one device needs at the peak of a training step.

    `frozen` are reference and teacher models, each with the bytes of one of its weights. A critic with a model of its own
    keeps its weights, gradients and moments in memory.

    Raises:
        ValueError: if the product of the axes of `config.parallel` is not the number of processes.
    """
    config = on_device(config, device)
    dims = ParallelDims.of(config.parallel, processes)
    shards = dims.dp_shard * dims.cp
    # The first stage has more layers and the embedding, the last one the output layer; assume a rank with both.
    layers = math.ceil(model.layers / dims.pp)
    ends = model.embedding * (1 if model.tied or dims.pp > 1 else 2)
    own_layers, own_ends = layers * model.layer // dims.tp, ends // dims.tp
    own = own_layers + own_ends
    half = config.dtype == "bfloat16"

    lora = config.lora.rank > 0
    trained = layers * model.factors(config.lora.rank) if lora else own
    base = BFLOAT16 if lora and config.lora.base_dtype == "bfloat16" else FLOAT32
    weights = (own_layers * base + own_ends * FLOAT32 + (trained * FLOAT32 if lora else 0)) // shards
    gradients = trained * FLOAT32 // shards
    if config.parallel.accumulate == "whole" and shards > 1:
        gradients += trained * FLOAT32
    return Memory(
        weights=weights,
        other_models=sum(each.parameters * width // (shards * dims.tp * dims.pp) for each, width in frozen)
        + (0 if critic is None else _state(estimate(critic, config, device=device, processes=processes))),
        gradients=gradients,
        moments=_moments(config, trained, own_layers, own_ends, lora=lora) // shards,
        copies=_copies(model, config, dims, own_layers, own_ends, half=half, lora=lora),
        activations=_activations(model, config, dims, layers, half=half),
        logits=_logits(model, config, dims, lora=lora),
    )


def _state(held: Memory) -> int:
    return held.weights + held.gradients + held.moments


def _moments(config: ComputeConfig, trained: int, layers: int, ends: int, *, lora: bool) -> int:
    if config.optimizer_offload:
        return 0
    if config.optimizer == "muon" and not lora:
        return layers * FLOAT32 + ends * 2 * FLOAT32
    return trained * 2 * FLOAT32


def _copies(
    model: Decoder, config: ComputeConfig, dims: ParallelDims, layers: int, ends: int, *, half: bool, lora: bool
) -> int:
    """Return the bytes of weights in the precision of the forward pass."""
    width = BFLOAT16 if half else FLOAT32
    if dims.dp_shard * dims.cp > 1:
        gathered = layers if not config.parallel.reshard else 2 * model.layer // dims.tp
        return gathered * width + ends * FLOAT32
    if not half or (lora and config.lora.base_dtype == "bfloat16"):
        return 0
    return layers * BFLOAT16


def _activations(model: Decoder, config: ComputeConfig, dims: ParallelDims, layers: int, *, half: bool) -> int:
    tokens = math.ceil(config.token_budget / dims.cp)
    hidden, inner = model.hidden, model.inner // dims.tp
    projected = (model.queries + model.keys) // dims.tp
    # With bfloat16, norms and RoPE still compute in float32; inputs and outputs of products are bfloat16.
    of_layer = 20 * hidden + 10 * projected + 8 * inner if half else 24 * hidden + 16 * projected + 16 * inner
    at_work = (BFLOAT16 if half else FLOAT32) * 3 * inner + FLOAT32 * 4 * hidden
    ends = FLOAT32 * 6 * hidden  # embedding, last norm, and the states that predict
    waiting = dims.pp  # micro-batches whose backward pass the first stage still has to run
    kept = waiting * layers * (FLOAT32 * hidden if config.gradient_checkpointing else of_layer)
    recomputed = of_layer if config.gradient_checkpointing else 0
    return tokens * (kept + recomputed + at_work + ends)


def _logits(model: Decoder, config: ComputeConfig, dims: ParallelDims, *, lora: bool) -> int:
    cells = math.ceil(config.token_budget / dims.cp) * model.vocabulary // dims.tp
    if model.whole_logits:
        return 3 * cells * FLOAT32  # logits, their log-softmax and its gradient
    gradient = 0 if lora else model.embedding // dims.tp * FLOAT32
    return min(cells, config.logit_cells) * FLOAT32 + gradient
