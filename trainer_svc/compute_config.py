"""Settings of the training engine (device, precision, parallelism, optimizer), and checks whether a model can be split that way.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

from pydantic import Field, model_validator

from sluice.config import ConfigError, Section
from sluice.config.tables import ParallelTable, TrainedAdapterTable
from sluice.models import ModelSizes, sizes_on_disk
from trainer_svc.precision import chosen_precision, frozen_precision

COMPILERS = ("g++", "clang++", "gcc", "clang")
"""Compilers that `torch.compile` looks for."""

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the device mesh. The last one changes fastest: neighbouring ranks, on one host, share the axis that communicates most."""

LAYER = "layers.*."
"""Prefix of the names of a decoder layer's modules in transformers' plans."""

COLUMNS, ROWS = "colwise", "rowwise"
"""transformers' names for splitting a matrix by its outputs or by its inputs."""

PARTIAL = "replicated_with_grad_allreduce"
"""transformers' name for a module that each process has whole but applies only to its own heads: its gradients must be summed."""

_Compute = TypeVar("_Compute", bound="ComputeConfig")
_Optimizer = TypeVar("_Optimizer", bound="OptimizerConfig")


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw: AdamW for every parameter. muon: Muon for the matrices of the hidden layers, AdamW for embeddings, heads, vectors and stacked experts.",
    )
    lr: float = Field(1e-6, ge=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field(
        (0.9, 0.95), description="AdamW's decay rates of the first and the second moment."
    )
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon, added to the denominator.")
    muon_lr: float = Field(
        0.0,
        ge=0,
        description="Peak learning rate of Muon's matrices; they follow the same schedule. 0: use `lr`, which suits `muon_scale = rms`.",
    )
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum (Nesterov).")
    muon_scale: Literal["rms", "spectral"] = Field(
        "rms",
        description="Scale of Muon's steps for a matrix of a x b. rms: 0.2 sqrt(max(a, b)), about the length of AdamW's steps. spectral: sqrt(max(1, a / b)), which needs its own `muon_lr`.",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decoupled weight decay of matrices, multiplied by the learning rate. Vectors are not decayed.",
    )
    warmup_steps: int = Field(
        0, ge=0, description="Optimizer steps of the warm-up, in which the learning rate rises linearly from 0."
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant",
        description="Learning rate after the warm-up. constant: no decay. linear, cosine: decay to `min_lr_ratio`. wsd: constant, then linear decay over the last `decay_steps`.",
    )
    decay_steps: int = Field(
        0, ge=0, description="Optimizer steps of the decay that ends at `max_steps`; only for `schedule = wsd`."
    )
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Learning rate at the end of the decay, as a fraction of `lr`."
    )
    grad_clip: float = Field(
        1.0, ge=0, description="Largest norm of the gradient; a larger gradient is scaled down to it. 0: no clipping."
    )
    max_steps: int = Field(
        0, ge=0, description="Optimizer step at which the decay ends; 0 only with `schedule = constant`."
    )

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if self.schedule == "wsd" and not self.decay_steps:
            raise ValueError("schedule wsd needs decay_steps, which is 0: set decay_steps, or use schedule constant")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas[0]:g} and {self.betas[1]:g}: give two values in [0, 1)")
        return self


def check_decay(config: _Optimizer) -> _Optimizer:
    """Refuse a schedule whose decay has no steps; return the settings.

    Raises:
        ValueError: with the settings to change.
    """
    if config.schedule != "constant" and config.max_steps <= config.warmup_steps:
        raise ValueError(
            f"schedule {config.schedule} ends at max_steps ({config.max_steps}): set max_steps above warmup_steps ({config.warmup_steps})"
        )
    if config.schedule == "wsd" and config.warmup_steps + config.decay_steps > config.max_steps:
        raise ValueError(
            f"warmup_steps ({config.warmup_steps}) and decay_steps ({config.decay_steps}) together exceed max_steps ({config.max_steps}): lower one of them"
        )
    return config


class ParallelConfig(ParallelTable):
    """How the trainer's processes share the model and the batch. The product of the axes is the number of processes."""

    dp_replicate: int = Field(
        1,
        ge=1,
        description="Copies of the model, each sharded over `dp_shard` processes; gradients are summed over the copies.",
    )
    dp_shard: int = Field(
        -1,
        ge=-1,
        description="Processes over which weights, gradients and optimizer state are sharded (FSDP2). -1: all processes that the other axes leave.",
    )
    tp: int = Field(1, ge=1, description="Processes that share each matrix product (tensor parallel).")
    cp: int = Field(1, ge=1, description="Processes that share each packed row of tokens (context parallel, Ulysses).")
    pp: int = Field(1, ge=1, description="Pipeline stages that share the layers (pipeline parallel).")
    reshard: bool = Field(
        True,
        description="Free gathered weights after each layer and gather them again for its backward pass. false: keep them for the whole step, which is faster and needs memory for the whole model.",
    )
    accumulate: Literal["auto", "whole", "sharded"] = Field(
        "auto",
        description="How gradients accumulate over a step's micro-batches. whole: each process accumulates whole gradients (4 bytes per parameter of its stage and tp slice), which are summed over processes once per step. sharded: they are summed after each micro-batch, and each process keeps its slice only. auto: whole where the memory of the devices is estimated to be enough, otherwise sharded.",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds that a process waits for the others in one collective operation before it fails.",
    )
    rendezvous_port: int = Field(
        7112,
        ge=1,
        le=65535,
        description="Port on the first machine where the machines of a trainer on several find each other.",
    )

    @model_validator(mode="after")
    def _shards(self) -> Self:
        if self.dp_shard == 0:
            raise ValueError("dp_shard is 0: give the number of processes, or -1 for all that the other axes leave")
        return self


class LoraConfig(TrainedAdapterTable):
    """Train low-rank factors (LoRA) beside the linear layers of a frozen model, instead of all weights."""

    rank: int = Field(
        0,
        ge=0,
        description="Rank of the factors. 0: train all weights; then no other setting of this table may be set.",
    )
    alpha: float = Field(
        16.0,
        gt=0,
        description="Scale of the factors' product, which is multiplied by alpha / rank; a higher rank then needs no other `lr`.",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the inputs of the factors.")
    target_modules: tuple[str, ...] = Field(
        (),
        description="Layers that get factors, by the last part of their names, such as q_proj,v_proj. Empty: all linear layers of the decoder layers.",
    )
    base_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision in which frozen matrices are stored. bfloat16 needs `dtype = bfloat16`; it halves their memory and changes no result, as they are computed in bfloat16 anyway. auto: bfloat16 on CUDA if `dtype` is bfloat16, otherwise float32.",
    )
    merge: bool | Literal["auto"] = Field(
        "auto",
        description="Write and publish the model with the factors merged into its weights, instead of a PEFT adapter. auto: merge in RL if the engine runs on a CPU, where sampling with an adapter takes three times as long; otherwise write an adapter.",
    )

    @property
    def merges(self) -> bool:
        """Whether merged weights are written. `auto` counts as false until a run has resolved it."""
        return self.merge is True

    @model_validator(mode="after")
    def _has_a_rank(self) -> Self:
        read = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.get_default()]
        if read and not self.rank:
            raise ValueError(
                f"{read[0]} is set, but rank is 0, which trains all weights: set rank, or remove {read[0]}"
            )
        return self


class ComputeConfig(OptimizerConfig):
    """Where and how a training step is computed."""

    token_budget: int = Field(
        8192,
        ge=1,
        description="Largest number of tokens in a micro-batch. A longer sequence gets a micro-batch of its own.",
    )
    fold_prompts: bool = Field(True, description="Compute the prompt that a group's sequences share only once.")
    logit_cells: int = Field(
        3 << 24,
        ge=1,
        description="Most logits (tokens x vocabulary, 4 bytes each) in memory at once; the others are computed again in the backward pass.",
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        "auto",
        description="Recompute activations in the backward pass, which saves memory and takes a third more time. auto: true on CUDA, false on a CPU.",
    )
    attention: Literal["auto", "sdpa", "varlen"] = Field(
        "auto",
        description="Attention kernel. sdpa: PyTorch's fused kernels on blocks of sequences of similar length. varlen: the flash kernel for packed rows (CUDA, bfloat16). auto: varlen where it works, otherwise sdpa.",
    )
    compile: bool = Field(
        False,
        description="Compile the decoder layers, except attention, with torch.compile. Takes a minute or more at the start; not with `parallel.tp`.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision of the forward pass; weights and optimizer stay float32. auto: in RL `rollout.dtype` if it is set; otherwise bfloat16 on CUDA and float32 on a CPU.",
    )
    optimizer_offload: bool | Literal["auto"] = Field(
        "auto",
        description="Keep AdamW's moments in host memory and step there. Saves 8 bytes per parameter on the GPU, and makes the step slower. No effect on a CPU. auto: true only where a step is estimated not to fit otherwise.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device that computes. auto: CUDA if there is a CUDA device, otherwise the CPU."
    )
    device_memory_gb: float | None = Field(
        None,
        gt=0,
        description="Memory of one device in GB (10^9 bytes). Settings that are estimated to need more are refused at the start and by `--dry-run`. Unset: the memory of the smallest CUDA device of this host; no check on a CPU.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads that compute. 0: PyTorch's default, or OMP_NUM_THREADS."
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak TFLOP/s of one device at the precision of `dtype`, for the metric `mfu`. Unset: the bf16 figure of a known GPU; without one there is no `mfu`.",
    )
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="How processes share the model and the batch."
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Train a LoRA adapter instead of all weights.")

    @model_validator(mode="after")
    def _settings_work_together(self) -> Self:
        """Refuse combinations that work on no device. The engine checks the others."""
        if self.lora.rank and (self.parallel.tp > 1 or self.parallel.pp > 1):
            raise ValueError(
                "adapters (lora.rank) do not work with tensor or pipeline parallelism: set parallel.tp and parallel.pp to 1, or lora.rank to 0"
            )
        if self.compile and self.parallel.tp > 1:
            raise ValueError(
                "torch.compile does not support matrices split by tp for varying numbers of tokens: set compile to false, or parallel.tp to 1"
            )
        single = self.dtype == "float32" or (self.dtype == "auto" and self.device == "cpu")
        if single and self.lora.base_dtype == "bfloat16":
            raise ValueError("lora.base_dtype is bfloat16, but the forward pass is float32: set dtype to bfloat16")
        if self.attention == "varlen" and (single or self.device == "cpu"):
            raise ValueError(
                "attention is varlen, but the kernel needs CUDA and half precision: set attention to auto or sdpa"
            )
        if self.optimizer_offload is True and self.optimizer == "muon":
            raise ValueError(
                "optimizer_offload steps on the CPU, which is too slow for Muon's matrix products: set optimizer to adamw, or optimizer_offload to false"
            )
        return self

    def uses_devices(self) -> bool:
        """Return whether a step is computed on GPUs if the host has some."""
        return self.device != "cpu"

    def check_compiler(self) -> None:
        """Refuse `compile` without a C++ compiler. CUDA kernels need one too, for the code that launches them.

        Raises:
            ConfigError: if there is no C++ compiler.
        """
        if self.compile and not os.environ.get("CXX") and not any(map(shutil.which, COMPILERS)):
            raise ConfigError(
                f"compile needs a C++ compiler, and none of {', '.join(COMPILERS)} is installed: install one, or set compile to false"
            )


def on_device(config: _Compute, device: str) -> _Compute:
    """Return the settings with each `auto` that depends on the device replaced by a value.

    On CUDA, memory is the limit. `auto` therefore recomputes activations and stores frozen weights in bfloat16. `device` is cpu or cuda.
    """
    dtype = chosen_precision(config.dtype, device)
    recompute = device == "cuda" if config.gradient_checkpointing == "auto" else config.gradient_checkpointing
    base = frozen_precision(config.lora.base_dtype, dtype, device)
    lora = config.lora.model_copy(update={"base_dtype": base})
    return config.model_copy(update={"dtype": dtype, "gradient_checkpointing": recompute, "lora": lora})


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """The sizes of a mesh of processes: the axes of `ParallelConfig`, each at least 1."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in MESH_AXES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 process or more")

    @classmethod
    def of(cls, config: ParallelConfig, world_size: int) -> Self:
        """Return the mesh of a job. `dp_shard = -1` stands for `world_size` divided by the product of the other axes.

        Raises:
            ValueError: if the product of the axes is not `world_size`.
        """
        fixed = config.dp_replicate * config.tp * config.cp * config.pp
        dp_shard = config.dp_shard
        if dp_shard == -1:
            dp_shard, left = divmod(world_size, fixed)
            if left:
                raise ValueError(
                    f"{world_size} processes are not a multiple of dp_replicate x tp x cp x pp = {fixed}: change"
                    " trainer.parallel, or start a multiple of them (torchrun --nproc-per-node)"
                )
        dims = cls(config.dp_replicate, dp_shard, config.tp, config.cp, config.pp)
        if dims.world_size != world_size:
            raise ValueError(
                f"trainer.parallel ({dims}) makes {dims.world_size} processes, but there are {world_size}: start that many"
                " (torchrun --nproc-per-node), or set dp_shard to -1 for all that the other axes leave"
            )
        return dims

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return math.prod(getattr(self, name) for name in MESH_AXES)

    @property
    def data_parallel(self) -> int:
        """Number of groups of processes with different rows: `dp_replicate` x `dp_shard`."""
        return self.dp_replicate * self.dp_shard

    def place(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on each axis, from 0; the last axis of `MESH_AXES` changes fastest."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} does not exist: there are {self.world_size} processes")
        place: dict[str, int] = {}
        for name in reversed(MESH_AXES):
            rank, place[name] = divmod(rank, getattr(self, name))
        return place

    def data_rank(self, rank: int) -> int:
        """Return the number of the rank's data-parallel group: ranks with the same number have the same rows."""
        place = self.place(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def ranks_of(self, data_rank: int) -> Iterable[int]:
        """Return the ranks with this `data_rank`, in ascending order."""
        return (rank for rank in range(self.world_size) if self.data_rank(rank) == data_rank)

    def __str__(self) -> str:
        """Return the axes with more than one process, such as ``dp_shard 4 x tp 2``; ``one process`` if there are none."""
        return (
            " x ".join(f"{name} {getattr(self, name)}" for name in MESH_AXES if getattr(self, name) > 1)
            or "one process"
        )


def check_sizes(model: str, setting: str, parallel: ParallelConfig, lora: LoraConfig | None = None) -> None:
    """Refuse a model on disk that cannot be trained in these processes, or not with an adapter if `lora` asks for one.

    Unknown sizes and hub ids are not checked.

    Raises:
        ConfigError: with the settings that work.
    """
    sizes = sizes_on_disk(model, setting)
    if sizes is None:
        return
    try:
        check_experts(sizes, processes_of(parallel), parallel.tp, lora or LoraConfig())
        if parallel.tp > 1 and sizes.model_type:
            check_tensor(sizes, parallel.tp)
        if parallel.cp > 1 and sizes.heads is not None:
            check_heads(sizes.heads, parallel.tp, parallel.cp)
        if parallel.pp > 1 and sizes.layers is not None:
            stage_layers(sizes.layers, parallel.pp)
    except ValueError as error:
        raise ConfigError(f"{setting} {model}: {error}") from error


def processes_of(parallel: ParallelConfig) -> int:
    """Return the number of processes. `dp_shard = -1` counts as 1, unless a launcher has set `WORLD_SIZE`."""
    axes = parallel.dp_replicate * parallel.tp * parallel.cp * parallel.pp
    return axes * parallel.dp_shard if parallel.dp_shard > 0 else max(axes, int(os.environ.get("WORLD_SIZE", "1")))


def check_experts(sizes: ModelSizes, processes: int, tp: int, lora: LoraConfig) -> None:
    """Refuse settings that do not work for a model of experts, because transformers stacks the experts of a layer in one tensor.

    Raises:
        ValueError: with the reason and the settings that work, if the model has experts and a setting does not work with them.
    """
    if not sizes.experts:
        return
    obstacle, reasons = None, []
    if tp > 1:
        obstacle = f"tensor parallelism (tp {tp}) splits linear layers, not stacked experts"
    elif processes > 1:
        obstacle = (
            f"each of these {processes} processes would read the whole model into the host's memory, 4 bytes per parameter, and"
            " gather the experts of all layers on its device to publish them"
        )
    if obstacle:
        reasons.append(
            f"a model of {sizes.experts} experts trains in one process only: {obstacle}; set every axis of trainer.parallel to 1, or"
            " choose a dense model"
        )
    if lora.rank and not lora.target_modules:
        reasons.append(
            f"an adapter (lora.rank {lora.rank}) trains linear layers only, and the {sizes.experts} experts of a layer are stacked tensors, which"
            " would stay as they are: name the layers to adapt (such as lora.target_modules = q_proj,k_proj,v_proj,o_proj), set"
            " lora.rank to 0, or choose a dense model"
        )
    if reasons:
        raise ValueError("; ".join(reasons))


def check_tensor(sizes: ModelSizes, tp: int) -> None:
    """Refuse a model that tensor parallelism cannot split.

    Raises:
        ValueError: if transformers has no usable plan for the architecture, or `tp` does not divide its sizes.
    """
    tensor_plan(sizes.model_type)
    named = {"attention heads": sizes.heads, "key-value heads": sizes.key_heads, "columns of the MLP": sizes.inner}
    for name, size in named.items():
        if size is not None and size % tp:
            raise ValueError(
                f"tp is {tp}, which does not divide the model's {size} {name}: set trainer.parallel.tp to a divisor of it"
            )


def tensor_plan(model_type: str) -> dict[str, str]:
    """Return transformers' plan for the layers of an architecture: the way in which each module is split, by its name in a layer.

    Raises:
        ValueError: if there is no plan, or a module is split in another way than by columns or rows.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  takes seconds, and only tensor parallelism needs it

    whole = (CONFIG_MAPPING[model_type].base_model_tp_plan if model_type in CONFIG_MAPPING else None) or {}
    plan = {name.removeprefix(LAYER): style for name, style in whole.items() if name.startswith(LAYER)}
    remedy = "set trainer.parallel.tp to 1 and use dp_shard or cp instead"
    if not plan:
        raise ValueError(f"transformers has no tensor-parallel plan for {model_type} models: {remedy}")
    others = sorted(set(plan.values()) - {COLUMNS, ROWS, PARTIAL})
    if others:
        raise ValueError(
            f"the tensor-parallel plan of {model_type} models splits modules by {', '.join(others)}, but the trainer splits by"
            f" columns or rows only: {remedy}"
        )
    return plan


def check_heads(heads: int, tp: int, cp: int) -> None:
    """Raise ValueError if context parallelism (Ulysses) cannot split the heads of one tensor-parallel process."""
    if heads // tp % cp:
        fitting = [size for size in range(1, heads // tp + 1) if heads // tp % size == 0]
        raise ValueError(
            f"cp is {cp}, which does not divide the {heads // tp} attention heads of a process ({heads} over tp {tp}): set"
            f" trainer.parallel.cp to one of {', '.join(map(str, fitting))}"
        )


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage, in order. If they do not divide evenly, the first stages have one more layer.

    The last stage never has one more layer, because it also has the head.

    Raises:
        ValueError: if there are fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(
            f"{layers} layers cannot be divided into {stages} stages: set trainer.parallel.pp to {layers} or less"
        )
    least, more = divmod(layers, stages)
    ends = [(stage + 1) * least + min(stage + 1, more) for stage in range(stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
