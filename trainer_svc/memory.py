"""Estimate the memory of training from the settings and the model's sizes. Pure; imports no torch.

`estimate` is for a step on the device that needs most, `host_bytes` for main memory. Both are for decoders with gated MLPs, such as
Llama and Qwen3, also with experts. On the device count

* weights: 4 bytes per parameter; 4 or 2 in a frozen base;
* gradients: 4 bytes per trained parameter, divided by sharding unless `accumulate` is `whole`;
* moments: AdamW 8 bytes per trained parameter, Muon 4; none on the device with `optimizer_offload`;
* copies: weights in the precision of the forward pass, see `copies_bytes`;
* activations: the tensors that autograd keeps of each layer (with `gradient_checkpointing` only the layer's input);
* work: temporary memory of the most expensive part of a step: the output layer, the backward pass of one layer, or, if gradients
  are summed after each micro-batch, the sum of the gradients of embedding and output layer;
* other models: a reference, a teacher, and a critic with its own model.

Not counted are the allocator's fragmentation, CUDA's own memory (about 1 GB) and communication buffers: `sluice.config.footprint.USABLE` leaves room for them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

from sluice.config.footprint import GIB
from sluice.decoder import Decoder
from trainer_svc.compute_config import ComputeConfig, ParallelDims, on_device

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a float32 and of a bfloat16 number."""

OFFLOAD_BUFFERS = 2 * (256 << 20)
"""Bytes of main memory through which weights and gradients pass with `optimizer_offload`."""

Decisions = Mapping[str, tuple[object, str]]
"""Values in place of `auto`, by the name of the setting, each with its reason."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by use at the peak of a step, on the device that needs most."""

    weights: int
    other_models: int
    gradients: int
    moments: int
    copies: int
    activations: int
    work: int

    @property
    def total(self) -> int:
        """Bytes of all uses."""
        return sum(getattr(self, each.name) for each in fields(self))

    def __str__(self) -> str:
        """Return the uses in GiB, the largest first."""
        held = sorted(((getattr(self, each.name), each.name) for each in fields(self)), reverse=True)
        return ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for size, name in held if size)


@dataclass(frozen=True, slots=True)
class _Share:
    """One process's share of a model, in parameters before they are sharded.

    Attributes:
        layers: Number of decoder layers of its stage.
        layer: Parameters of one layer.
        ends: Parameters of embedding and output layer.
        output: Parameters of the output layer alone.
        shards: Processes over which weights, gradients and moments are divided.
        tokens: Tokens of a micro-batch.
    """

    layers: int
    layer: int
    ends: int
    output: int
    shards: int
    tokens: int

    @classmethod
    def of(cls, model: Decoder, config: ComputeConfig, dims: ParallelDims, longest: int) -> _Share:
        return cls(
            # The first stage has more layers and the embedding, the last stage the output layer. Assume a rank that has all of these.
            layers=math.ceil(model.layers / dims.pp),
            layer=model.layer // dims.tp,
            ends=model.embedding * (1 if model.tied or dims.pp > 1 else 2) // dims.tp,
            output=model.embedding // dims.tp,
            shards=dims.dp_shard * dims.cp,
            tokens=math.ceil(max(config.token_budget, longest) / dims.cp),
        )

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.ends


def estimate(
    model: Decoder,
    config: ComputeConfig,
    *,
    device: str = "cuda",
    processes: int = 1,
    longest: int = 0,
    frozen: Iterable[tuple[Decoder, int]] = (),
    critic: tuple[Decoder, ComputeConfig] | None = None,
) -> Memory:
    """Return the memory that one device needs at the peak of a training step.

    Args:
        model: The policy.
        config: The settings. `auto` means the device's value; for `accumulate` it means `whole`, for `optimizer_offload` false.
        device: Kind of the device: cpu or cuda.
        processes: Processes of the trainer.
        longest: Tokens of the longest row; above `token_budget` it has a micro-batch of its own.
        frozen: Reference and teacher models, each with the bytes of one of its weights.
        critic: The model and the settings of a critic with its own model, which keeps weights, gradients and moments in memory.

    Raises:
        ValueError: if the product of the axes of `config.parallel` is not the number of processes.
    """
    config = on_device(config, device)
    dims = ParallelDims.of(config.parallel, processes)
    own = _Share.of(model, config, dims, longest)
    half, lora = config.dtype == "bfloat16", config.lora.rank > 0
    trained = own.layers * model.factors(config.lora.rank) if lora else own.parameters
    base = BFLOAT16 if lora and config.lora.base_dtype == "bfloat16" else FLOAT32
    weights = own.parameters * base + (trained * FLOAT32 if lora else 0)
    # Whole gradients are freed one by one as they are summed, so that all slices and all whole gradients never exist together.
    gradients = trained * FLOAT32 // (1 if config.parallel.accumulate == "whole" else own.shards)
    activations, work = _activations(model, config, dims, own, half=half)
    other = 0
    if critic is not None:
        beside = estimate(*critic, device=device, processes=processes, longest=longest)
        other = beside.weights + beside.gradients + beside.moments
        # Policy and critic are trained one after the other, not together.
        extra = beside.copies + beside.activations + beside.work
        work += max(0, extra - activations - work - copies_bytes(config, own, half=half, lora=lora))
    return Memory(
        weights=weights // own.shards,
        other_models=sum(each.parameters * width // (own.shards * dims.tp * dims.pp) for each, width in frozen) + other,
        gradients=gradients,
        moments=_moments(config, own, trained, lora=lora) // own.shards,
        copies=copies_bytes(config, own, half=half, lora=lora),
        activations=activations,
        work=work,
    )


def _moments(config: ComputeConfig, own: _Share, trained: int, *, lora: bool) -> int:
    if config.optimizer_offload is True:
        return 0
    if config.optimizer == "muon" and not lora:
        return own.layers * own.layer * FLOAT32 + own.ends * 2 * FLOAT32
    return trained * 2 * FLOAT32


def copies_bytes(config: ComputeConfig, own: _Share, *, half: bool, lora: bool) -> int:
    """Return the bytes of weights in the precision of the forward pass.

    A bfloat16 pass computes with bfloat16 copies of its layers. On one device the copy of a layer lives from its forward to its backward
    pass: at the peak all copies exist, or with `gradient_checkpointing` only the copy of the layer at work. Sharded weights are gathered:
    embedding and output layer, and two layers (one is fetched while the other computes) or, without `reshard`, all layers.
    """
    width = BFLOAT16 if half else FLOAT32
    if own.shards > 1:
        return ((2 if config.parallel.reshard else own.layers) * own.layer + own.ends) * width
    if not half or (lora and config.lora.base_dtype == "bfloat16"):
        return 0
    return BFLOAT16 * own.layer * (1 if config.gradient_checkpointing else own.layers)


def _activations(
    model: Decoder, config: ComputeConfig, dims: ParallelDims, own: _Share, *, half: bool
) -> tuple[int, int]:
    """Return the bytes kept from the forward to the backward pass, and the temporary bytes of the most expensive part of the step."""
    hidden, queries, keys = model.hidden, model.queries // dims.tp, model.keys // dims.tp
    width = BFLOAT16 if half else FLOAT32
    # With bfloat16, norms and RoPE still compute in float32; inputs and outputs of products are bfloat16.
    attention = 26 * hidden + 12 * queries + 14 * keys if half else 24 * hidden + 16 * (queries + keys)
    inner = model.inner // dims.tp * max(1, model.chosen)
    # A token has one input row and one output row per expert that is chosen for it.
    mlp = width * (4 * inner + 2 * hidden * model.chosen)
    of_layer = attention + mlp
    # Backward through an MLP: the product is freed; the gradients of the product, of both factors and of the hidden states exist.
    backward = width * (2 * inner + hidden * model.chosen) + FLOAT32 * hidden
    ends = FLOAT32 * 6 * hidden  # embedding, last norm, the states that predict, and their gradients
    waiting = dims.pp  # micro-batches whose backward pass the first stage still has to run
    each = FLOAT32 * hidden if config.gradient_checkpointing else of_layer
    kept = own.tokens * waiting * own.layers * each
    lora = config.lora.rank > 0
    gradient = 0 if lora else own.output * FLOAT32
    summed = own.shards > 1 and config.parallel.accumulate != "whole" and not lora
    output = own.tokens * ends + _logits(model, config, dims, own) + gradient
    recomputed = of_layer - FLOAT32 * hidden if config.gradient_checkpointing else 0  # its input was kept
    layer = own.tokens * (backward + recomputed)
    # FSDP keeps whole gradients: of embedding and output layer until the end of a backward pass, of one layer in the precision of the
    # pass, and of two layers in float32 while they are summed. Otherwise only the gradient of one matrix exists, before it is added.
    layer += (gradient + own.layer * (width + 2 * FLOAT32)) if summed else own.layer * FLOAT32 // 3
    last = own.ends * 2 * FLOAT32 - kept if summed else 0
    return kept, max(output, layer, last)


def host_bytes(model: Decoder, config: ComputeConfig, *, processes: int = 1, published: int = FLOAT32) -> int:
    """Return the main memory of each process of a trainer whose device is a GPU, at its peak.

    At start, a process reads its part of the weights into main memory before it moves them to the GPU. Later it keeps a copy of the
    last published version, to compare the next version with, and the difference that is being sent (at most half as large). After the
    first checkpoint it also keeps a pinned copy of the trained weights and of the moments; moments that are already in main memory
    need no copy.

    Args:
        model: The policy.
        config: The settings.
        processes: Processes of the trainer.
        published: Bytes of a published weight.
    """
    lora = config.lora.rank > 0
    trained = model.layers * model.factors(config.lora.rank) if lora else model.parameters
    sent = trained if lora and not config.lora.merges else model.parameters
    moments = 0 if config.optimizer_offload is True else 2 * FLOAT32
    later = sent * published * 3 // 2 + trained * (FLOAT32 + moments)
    if config.optimizer_offload is True:
        later += trained * 2 * FLOAT32 + OFFLOAD_BUFFERS * processes
    return max(model.parameters * FLOAT32, later) // processes


def fit(
    config: ComputeConfig,
    needed: Callable[[ComputeConfig], Memory],
    capacity: float | None,
    *,
    device: str,
    shards: int,
) -> Decisions:
    """Replace `accumulate` and `optimizer_offload` if they are `auto`, by the fastest values that fit, else by those that need least.

    Args:
        config: The settings.
        needed: Estimates a step with other settings.
        capacity: Bytes of a device that may be used; None if unknown: then nothing is decided.
        device: Kind of the device: cpu or cuda.
        shards: Processes over which weights are divided; whole gradients need more than one.
    """
    if capacity is None:
        return {}
    sums = ["whole", "sharded"] if shards > 1 and config.parallel.accumulate == "auto" else [config.parallel.accumulate]
    may_offload = config.optimizer_offload == "auto" and config.optimizer == "adamw" and device == "cuda"
    offloads = [False, True] if may_offload else [config.optimizer_offload]
    tried: list[Memory] = []
    for offload, accumulate in itertools.product(offloads, sums):
        parallel = config.parallel.model_copy(update={"accumulate": accumulate})
        tried.append(needed(config.model_copy(update={"parallel": parallel, "optimizer_offload": offload})))
        if tried[-1].total <= capacity:
            break
    decided: dict[str, tuple[object, str]] = {}
    of = f"of {capacity / GIB:.1f} GiB"
    if len(sums) > 1:
        reason = f"a step is estimated to need {tried[-1].total / GIB:.1f} GiB {of}"
        if accumulate == "sharded":
            reason = f"whole gradients would need {tried[-2].total / GIB:.1f} GiB {of}"
        decided["parallel.accumulate"] = (accumulate, reason)
    if offload is True and may_offload:
        kept = tried[len(sums) - 1].total / GIB
        decided["optimizer_offload"] = (
            True,
            f"with the moments on the device a step would need {kept:.1f} GiB {of}; its optimizer step is slower",
        )
    return decided


def _logits(model: Decoder, config: ComputeConfig, dims: ParallelDims, own: _Share) -> int:
    cells = own.tokens * model.vocabulary // dims.tp
    if model.whole_logits:
        return 3 * cells * FLOAT32  # logits, their log-softmax and its gradient
    return min(cells, config.logit_cells) * FLOAT32
