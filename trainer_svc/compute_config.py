"""Settings of the training engine: what computes, how, and with which optimizer. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import Literal, Self, TypeVar

from pydantic import Field, model_validator

from sluice.config import Section

__all__ = [
    "ComputeConfig",
    "LoraConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Precision",
    "check_decay",
    "frozen_precision",
    "on_device",
]

Precision = Literal["auto", "float32", "bfloat16"]
"""Precision of a forward pass, or in which weights are kept; auto decides by the device."""

_Compute = TypeVar("_Compute", bound="ComputeConfig")


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw for every parameter; or muon for the matrices of the hidden layers, and AdamW for embeddings, heads, vectors and stacked experts.",
    )
    lr: float = Field(1e-6, ge=0, description="Peak learning rate, per step.")
    betas: tuple[float, float] = Field(
        (0.9, 0.95), description="AdamW's decay of the first and the second moment, per step."
    )
    eps: float = Field(1e-8, gt=0, description="AdamW's denominator offset.")
    muon_lr: float = Field(
        0.0,
        ge=0,
        description="Peak learning rate of Muon's matrices, per step, with the same schedule; 0: `lr`, which `muon_scale = rms` is meant for.",
    )
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Decay of Muon's momentum, per step; Nesterov's form.")
    muon_scale: Literal["rms", "spectral"] = Field(
        "rms",
        description="Length of Muon's steps for a matrix of a x b: rms, 0.2 sqrt(max(a, b)), about AdamW's; spectral, sqrt(max(1, a / b)), for a `muon_lr` of its own.",
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay of matrices, times the learning rate; vectors are not decayed."
    )
    warmup_steps: int = Field(
        0, ge=0, description="Optimizer steps over which the learning rate rises linearly from 0."
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant",
        description="Learning rate after the warm-up: constant; linear or cosine decay to `min_lr_ratio`; or wsd, constant and then linear decay over the last `decay_steps`.",
    )
    decay_steps: int = Field(
        0, ge=0, description="Optimizer steps of the decay that ends at `max_steps`; read by `schedule = wsd` alone."
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Learning rate at the end of a decay, as a share of `lr`.")
    grad_clip: float = Field(
        1.0, ge=0, description="Largest norm of the gradient; longer ones are scaled down; 0 never scales."
    )
    max_steps: int = Field(
        0, ge=0, description="Optimizer steps at which a decay ends; 0 is allowed with `schedule = constant` only."
    )

    @model_validator(mode="after")
    def _wsd_decays(self) -> Self:
        if self.schedule == "wsd" and not self.decay_steps:
            raise ValueError("schedule wsd decays over decay_steps, which is 0: set it, or use schedule constant")
        return self

    @model_validator(mode="after")
    def _decays_below_one(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas lie in [0, 1)")
        return self


def check_decay(config: OptimizerConfig) -> None:
    """Refuse a decay that has no steps of its own.

    Raises:
        ValueError: with the settings to change.
    """
    if config.schedule != "constant" and config.max_steps <= config.warmup_steps:
        raise ValueError(
            f"schedule {config.schedule} ends at max_steps: set max_steps above warmup_steps ({config.warmup_steps})"
        )
    if config.schedule == "wsd" and config.warmup_steps + config.decay_steps > config.max_steps:
        raise ValueError(
            f"warmup_steps and decay_steps ({config.warmup_steps} and {config.decay_steps}) are more than max_steps ({config.max_steps}): lower one of them"
        )


class ParallelConfig(Section):
    """How many processes share the model and the batch. The product of the axes is the number of processes."""

    dp_replicate: int = Field(
        1,
        ge=1,
        description="Copies of the model, each sharded over `dp_shard` processes; gradients are summed over the copies.",
    )
    dp_shard: int = Field(
        -1,
        ge=-1,
        description="Processes that weights, gradients and optimizer state are sharded over (FSDP2); -1: all that the other axes leave.",
    )
    tp: int = Field(1, ge=1, description="Processes that share each matrix product (tensor parallel).")
    cp: int = Field(1, ge=1, description="Processes that share each packed row of tokens (context parallel, Ulysses).")
    pp: int = Field(1, ge=1, description="Pipeline stages that share the layers (pipeline parallel).")
    reshard: bool = Field(
        True,
        description="Free gathered weights after each layer and gather them again for its backward pass. false: keep them for the whole step, which is faster and takes the memory of the whole model.",
    )
    accumulate: Literal["whole", "sharded"] = Field(
        "whole",
        description="How gradients accumulate over a step's micro-batches. whole: every process accumulates its own (4 bytes per parameter of its stage and tp slice), and they are summed over processes once. sharded: they are summed after each micro-batch, and each process keeps its slice.",
    )
    timeout_s: float = Field(
        600.0, gt=0, description="Seconds that a process waits for the others in one collective before it fails."
    )

    @model_validator(mode="after")
    def _shards(self) -> Self:
        if self.dp_shard == 0:
            raise ValueError("dp_shard is 0: give the number of processes, or -1 for all that the other axes leave")
        return self


class LoraConfig(Section):
    """Low-rank factors beside the linear layers of a frozen model, in place of training all weights."""

    rank: int = Field(0, ge=0, description="Rank of the factors; 0 trains all weights and takes nothing else here.")
    alpha: float = Field(
        16.0,
        gt=0,
        description="The factors' product is scaled by alpha / rank; a higher rank then needs no other `lr`.",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of a layer's inputs that the factors do not see in a step."
    )
    target_modules: tuple[str, ...] = Field(
        (),
        description="Last parts of the names of the layers that get factors, such as q_proj,v_proj; empty: all linear layers of the blocks.",
    )
    base_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision in which the frozen linear layers are kept. bfloat16 needs `dtype` bfloat16, in which they are computed anyhow: half the memory, the same results. auto: bfloat16 on CUDA where `dtype` is, else float32.",
    )
    merge: bool | Literal["auto"] = Field(
        "auto",
        description="Write and publish the model with the factors added to its weights, instead of an adapter for PEFT. auto: in RL, if the engine is on a CPU, where it samples with an adapter at a third of its speed; elsewhere an adapter.",
    )

    @property
    def merges(self) -> bool:
        """Whether whole weights are written. An `auto` that no run has decided writes an adapter."""
        return self.merge is True

    @model_validator(mode="after")
    def _has_a_rank(self) -> Self:
        read = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.get_default()]
        if read and not self.rank:
            raise ValueError(f"rank is 0, which trains all weights and does not read {read[0]}: set rank, or remove it")
        return self


class ComputeConfig(OptimizerConfig):
    """Where and how a step is computed."""

    token_budget: int = Field(
        8192, ge=1, description="Most tokens forwarded at once (one micro-batch); a longer sequence goes alone."
    )
    fold_prompts: bool = Field(True, description="Forward the prompt that a group's sequences share once.")
    logit_cells: int = Field(
        3 << 24,
        ge=1,
        description="Most logits (tokens x vocabulary) alive at once, 4 bytes each; those beyond are made again in the backward pass.",
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        "auto",
        description="Recompute activations in the backward pass: less memory, a third more time. auto: on CUDA, not on a CPU.",
    )
    attention: Literal["auto", "sdpa", "varlen"] = Field(
        "auto",
        description="sdpa: stock kernels over blocks of sequences of similar length; varlen: the flash kernel that takes a packed row as it lies (CUDA, bfloat16). auto: varlen where it works.",
    )
    compile: bool = Field(
        False,
        description="Make kernels for the decoder layers by torch.compile, which takes a minute or more at the start; attention stays as it is. Not with `parallel.tp`.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision of the forward pass; weights and optimizer stay float32. auto: in RL what `rollout.dtype` says, if that is set; else bfloat16 on CUDA, float32 on a CPU.",
    )
    optimizer_offload: bool = Field(
        False,
        description="Keep AdamW's moments in the host's memory and step there: 8 bytes per parameter less on the GPU, and a slower step; changes nothing on a CPU.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where to compute; auto takes CUDA where there is one."
    )
    device_memory_gb: float | None = Field(
        None,
        gt=0,
        description="Memory of one device in GB (10^9 bytes). Settings whose estimated memory is above it are refused at the start and by `--dry-run`. Unset: that of the smallest CUDA device here; no check on a CPU.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of the computation; 0 leaves it to PyTorch and OMP_NUM_THREADS."
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak of one device in TFLOP/s at the precision of `dtype`, for the metric `mfu`; unset takes the bf16 figure of a known GPU, and leaves `mfu` out elsewhere.",
    )
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Several processes for one model.")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Train an adapter instead of all weights.")

    @model_validator(mode="after")
    def _shards_adapters_by_data(self) -> Self:
        if self.lora.rank and (self.parallel.tp > 1 or self.parallel.pp > 1):
            raise ValueError(
                "adapters are trained over dp_replicate, dp_shard and cp: set parallel.tp and parallel.pp to 1, or lora.rank to 0"
            )
        return self

    @model_validator(mode="after")
    def _compiles_whole_matrices(self) -> Self:
        if self.compile and self.parallel.tp > 1:
            raise ValueError(
                "torch.compile cannot take matrices cut by tp for any number of tokens: set compile to false, or parallel.tp to 1"
            )
        return self

    @model_validator(mode="after")
    def _has_the_precision(self) -> Self:
        """Refuse what is known before a device is looked for; the engine finds the rest."""
        single = self.dtype == "float32" or (self.dtype == "auto" and self.device == "cpu")
        if single and self.lora.base_dtype == "bfloat16":
            raise ValueError("lora.base_dtype is bfloat16, but the forward pass is float32: set dtype to bfloat16")
        if self.attention == "varlen" and (single or self.device == "cpu"):
            raise ValueError(
                "attention is varlen, but the kernel needs CUDA and half precision: set attention to auto or sdpa"
            )
        return self

    @model_validator(mode="after")
    def _offloads_adamw(self) -> Self:
        if self.optimizer_offload and self.optimizer == "muon":
            raise ValueError(
                "optimizer_offload steps on the CPU, which is too slow for Muon's matrix products: set optimizer to adamw, or optimizer_offload to false"
            )
        return self


def on_device(config: _Compute, device: str) -> _Compute:
    """Return the settings with a value in place of each `auto` that depends on the device.

    On CUDA memory is what limits a run, so that activations are recomputed and frozen weights kept in bfloat16. A setting that
    was given stays.

    Args:
        config: The settings.
        device: Kind of the device that computes: cpu or cuda.
    """
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    recompute = device == "cuda" if config.gradient_checkpointing == "auto" else config.gradient_checkpointing
    base = frozen_precision(config.lora.base_dtype, dtype, device)
    lora = config.lora.model_copy(update={"base_dtype": base})
    return config.model_copy(update={"dtype": dtype, "gradient_checkpointing": recompute, "lora": lora})


def frozen_precision(setting: Precision, dtype: Precision, device: str) -> Precision:
    """Return the precision in which weights that no optimizer changes are kept.

    Args:
        setting: What the settings say.
        dtype: Precision of the forward pass.
        device: Kind of the device that computes: cpu or cuda.
    """
    if setting != "auto":
        return setting
    return "bfloat16" if device == "cuda" and dtype == "bfloat16" else "float32"
