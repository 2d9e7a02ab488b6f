"""The optimizer step: learning rate, norm of the gradient, clipping, and AdamW, or Muon together with AdamW; their state as flat tensors.

Parameters, gradients and moments may be DTensors; each process then holds a slice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from threading import Event
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trainer_svc.compute_config import ComputeConfig, OptimizerConfig
from trainer_svc.engine.out_of_memory import HalfAppliedError, first_line, is_out_of_memory
from trainer_svc.parallel.mesh import Mesh
from trainer_svc.parallel.sharding import local_slice
from trainer_svc.precision import VALUE_HEADS

MUON_SCALES = {"rms": "match_rms_adamw", "spectral": "original"}
"""torch's names of the ways to scale Muon's steps, by the names in the settings."""

HEADS = (*VALUE_HEADS, "lm_head")
"""Modules on top of a model. AdamW trains them, like embeddings, because their outputs are not hidden states."""

BUFFER_ELEMENTS = 1 << 26
"""Weights that pass through the offload buffers at once: 256 MiB, enough for full copy speed. A larger tensor passes as a whole."""

READ_S = 1800.0
"""Seconds that a step waits for a checkpoint to read the offloaded moments."""

NORM_OFFSET = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""

log = structlog.get_logger(__name__)


def schedule_factor(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of the step with this index, counted from 0, as a share of the peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            remaining = 1.0 - _progress(config.warmup_steps, config.max_steps, step)
        case "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * _progress(config.warmup_steps, config.max_steps, step)))
        case "wsd":
            begin = max(config.warmup_steps, config.max_steps - config.decay_steps)
            remaining = 1.0 - _progress(begin, config.max_steps, step)
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining


def _progress(begin: int, end: int, step: int) -> float:
    """Return the share of a decay that is done: 0 up to step `begin`, 1 from step `end` on."""
    return min(1.0, max(0.0, (step - begin) / (end - begin)))


def total_norm(
    gradients: Iterable[torch.Tensor], mesh: Mesh, *, refused: bool = False, in_two_stages: torch.Tensor | None = None
) -> tuple[float, bool]:
    """Return the 2-norm of the whole gradient; each element counts once, however many processes have it.

    Args:
        gradients: Plain tensors, equal on all processes of a pipeline stage, and DTensors on any axes of the mesh.
        mesh: The processes; all of them call this.
        refused: Whether this process skips the step for another reason.
        in_two_stages: The gradient of a tied weight, which another pipeline stage holds, too.

    Returns:
        The norm, and whether it is finite and no process refused: the same on every process.
    """
    by_copies: dict[int, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        copies, local = _counted(gradient, mesh)
        by_copies[copies * 2 if gradient is in_two_stages else copies].append(local)
    norms = {copies: torch.nn.utils.get_total_norm(parts, foreach=True) for copies, parts in by_copies.items()}
    sums = torch.zeros(2, dtype=torch.float64)
    sums[0] = sum(float(norm.double()) ** 2 / copies for copies, norm in norms.items())
    sums[1] = float(refused)
    if mesh.everyone is not None:
        dist.all_reduce(sums, group=mesh.everyone)
    norm, refusals = math.sqrt(sums[0]) if sums[0] >= 0 else math.nan, float(sums[1])
    return norm, math.isfinite(norm) and not refusals


def _counted(gradient: torch.Tensor, mesh: Mesh) -> tuple[int, torch.Tensor]:
    """Return how many processes of this stage hold the same slice of a gradient as this process, and the slice."""
    if mesh.everyone is None:
        return 1, gradient
    copies = mesh.dims.world_size // mesh.dims.pp
    if not isinstance(gradient, DTensor):
        return copies, gradient
    for axis, placement in enumerate(gradient.placements):
        if not placement.is_replicate():
            copies //= gradient.device_mesh.size(axis)
    return copies, gradient.to_local()


def clip(gradients: Iterable[torch.Tensor], norm: float, limit: float) -> None:
    """Scale a gradient down to norm `limit` if its norm is larger."""
    factor = limit / (norm + NORM_OFFSET)
    if factor < 1.0:
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        torch._foreach_mul_(parts, factor)


class Optimizers:
    """One optimizer, or two; each parameter belongs to one of them.

    Attributes:
        changed_lr: Peak learning rate that replaces the settings' `lr`; None as long as nobody has changed it.
    """

    changed_lr: float | None = None

    def __init__(self, config: ComputeConfig, parts: Collection[torch.optim.Optimizer]) -> None:
        self.config = config
        self.parts = tuple(parts)

    @property
    def peak_lr(self) -> float:
        """The peak learning rate. Muon's matrices use `muon_lr` instead if it is set."""
        return self.config.lr if self.changed_lr is None else self.changed_lr

    def learning_rate(self, index: int) -> float:
        """Return the learning rate after `index` optimizer steps."""
        return self.peak_lr * schedule_factor(self.config, index)

    @property
    def owners(self) -> dict[torch.nn.Parameter, torch.optim.Optimizer]:
        """The optimizer of each parameter."""
        return {each: part for part in self.parts for group in part.param_groups for each in group["params"]}

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def step(self, index: int) -> None:
        """Apply the gradients. The learning rates follow from `index`, the number of optimizer steps before this one.

        Raises:
            HalfAppliedError: if memory runs out when some weights may have changed already. If it runs out earlier, while the
                moments are allocated in the first step, nothing has changed and PyTorch's own error is raised.
        """
        factor = schedule_factor(self.config, index)
        self._add_missing_state()
        try:
            for part in self.parts:
                peak = self.config.muon_lr or self.peak_lr if isinstance(part, torch.optim.Muon) else self.peak_lr
                for group in part.param_groups:
                    group["lr"] = peak * factor
                part.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise HalfAppliedError(f"in the middle of an optimizer step: {first_line(error)}") from error

    def _add_missing_state(self) -> None:
        """Allocate missing moments (zeros) of parameters with a gradient, so that the step itself allocates none."""
        for part in self.parts:
            for parameter in (each for group in part.param_groups for each in group["params"]):
                if parameter.grad is not None and not part.state.get(parameter):
                    part.state[parameter] = {moment: _room(part, parameter, moment) for moment in _moments(part)}

    def tensors(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.Tensor]:
        """Return the live tensors of the state, named ``<moment>.<parameter>``."""
        owners = self.owners
        return {
            f"{moment}.{name}": tensor
            for name, parameter in named
            if parameter in owners
            for moment, tensor in owners[parameter].state.get(parameter, {}).items()
        }

    def lend(self, named: Iterable[tuple[str, torch.nn.Parameter]], read: Event) -> set[str]:
        """Keep the state in host memory unchanged until `read` is set; return its names (see `tensors`)."""
        names: set[str] = set()
        given = list(named)
        for part in self.parts:
            if isinstance(part, OffloadedAdamW):
                part.lend(read)
                names |= {f"{moment}.{name}" for name, each in given for moment in part.state.get(each, {})}
        return names

    def make_room(
        self, named: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, torch.Size]
    ) -> dict[str, torch.Tensor]:
        """Replace the state by zeros, and return them for the caller to fill. `shapes` has the shape of each of `tensors`, by name.

        Raises:
            ValueError: if a tensor belongs to no parameter or to another optimizer, is missing or has another shape. The state is
                unchanged then.
        """
        owners, wanted = self.owners, dict[torch.nn.Parameter, list[str]]()
        for key, shape in shapes.items():
            moment, _, name = key.partition(".")
            parameter = named.get(name)
            if parameter is None or parameter not in owners or moment not in _moments(owners[parameter]):
                raise ValueError(
                    f"optimizer tensor {key!r} belongs to no parameter of this model and optimizer: resume with the model and the optimizer that were saved"
                )
            if moment != "step" and shape != parameter.shape:
                raise ValueError(
                    f"optimizer tensor {key!r} has shape {tuple(shape)}, expected {tuple(parameter.shape)}"
                )
            wanted.setdefault(parameter, []).append(moment)
        for name, parameter in named.items():
            if parameter in wanted and len(wanted[parameter]) < len(_moments(owners[parameter])):
                raise ValueError(f"the optimizer state of {name!r} is incomplete: use another checkpoint")
        for part in self.parts:
            part.state.clear()
        for parameter, moments in wanted.items():
            part = owners[parameter]
            part.state[parameter] = {moment: _room(part, parameter, moment) for moment in moments}
        return self.tensors(named.items())


def _moments(part: torch.optim.Optimizer) -> tuple[str, ...]:
    return ("momentum_buffer",) if isinstance(part, torch.optim.Muon) else ("step", "exp_avg", "exp_avg_sq")


def _room(part: torch.optim.Optimizer, parameter: torch.nn.Parameter, moment: str) -> torch.Tensor:
    offloaded = isinstance(part, OffloadedAdamW)
    if moment == "step":
        return torch.zeros((), device="cpu" if offloaded else parameter.device)
    return part.empty_moment(parameter) if offloaded else torch.zeros_like(parameter, requires_grad=False)


def build_optimizers(config: ComputeConfig, model: PreTrainedModel, device: torch.device) -> Optimizers:
    """Build the optimizers of a model's trainable parameters. Weight decay applies to matrices, not to vectors (norms, biases).

    Call it after the model was distributed over processes.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = _hidden_matrices(model) if config.optimizer == "muon" else set()
    parts: list[torch.optim.Optimizer] = []
    if matrices := [each for each in trainable if each in hidden]:
        parts.append(
            ShardedMuon(
                matrices,
                lr=config.muon_lr or config.lr,
                weight_decay=config.weight_decay,
                momentum=config.muon_momentum,
                adjust_lr_fn=MUON_SCALES[config.muon_scale],
            )
        )
    if others := [each for each in trainable if each not in hidden]:
        parts.append(_adamw(config, others, device))
    return Optimizers(config, parts)


def _adamw(
    config: ComputeConfig, parameters: Iterable[torch.nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    groups: dict[object, dict[str, Any]] = {}
    for each in parameters:
        # A fused kernel takes only tensors of one layout.
        mesh = each.device_mesh if isinstance(each, DTensor) else None
        decay = config.weight_decay if each.ndim >= 2 else 0.0
        groups.setdefault((mesh, each.ndim >= 2), {"params": [], "weight_decay": decay})["params"].append(each)
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.optimizer_offload is True and device.type == "cpu":
        log.warning("optimizer_offload changes nothing: the model is in the host's memory already")
    elif config.optimizer_offload is True:
        return OffloadedAdamW(list(groups.values()), **options)
    return torch.optim.AdamW(list(groups.values()), **options, fused=True)


def _hidden_matrices(model: PreTrainedModel) -> set[torch.nn.Parameter]:
    """Return the matrices that map hidden states to hidden states: all except embeddings and heads."""
    outside = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    outside += [model.get_output_embeddings(), *(getattr(model, name, None) for name in HEADS)]
    excluded = {each for module in outside if module is not None for each in module.parameters()}
    return {each for each in model.parameters() if each.ndim == 2 and each not in excluded}


class ShardedMuon(torch.optim.Muon):  # type: ignore[misc]  # torch has no type for it
    """torch.optim.Muon for plain matrices and DTensors, with the same step as for a whole matrix.

    torch.optim.Muon accepts DTensors too, but computes its bfloat16 matrix products in an order that depends on the layout:
    steps with one process and with two differ by 2-4% of their length. Here matrices are gathered one at a time, and every
    process orthogonalises the whole matrix.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks"; step lengths of Liu et al., 2502.16982.
    """

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients. All processes that hold a slice of a matrix call this together."""
        if closure is not None:
            raise ValueError("the step takes no closure: compute the gradients before it")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)
        return None

    def _step_one(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        change = _whole_step(update.full_tensor() if isinstance(update, DTensor) else update, group)
        local, offsets = local_slice(parameter)
        places = tuple(slice(begin, begin + size) for begin, size in zip(offsets, local.shape, strict=True))
        local.mul_(1 - group["lr"] * group["weight_decay"]).add_(change[places])


def _whole_step(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return the step that torch's Muon adds to a matrix for this update; `update` includes the momentum."""
    matrix = torch.nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    fixed = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    options = {name: group[name] for name in fixed}
    torch.optim.Muon([matrix], weight_decay=0.0, momentum=0.0, nesterov=False, **options).step()
    return matrix.detach()


class OffloadedAdamW(torch.optim.AdamW):  # type: ignore[misc]  # torch has no type for it
    """AdamW that keeps its moments and computes its step in host memory; weights and gradients stay on the GPU.

    FSDP2's CPUOffloadPolicy, in contrast, also moves the weights to the host, and back layer by layer in each forward pass. The
    moments of a DTensor are DTensors of the same layout with their slice in host memory. This takes 8 bytes of host memory per
    parameter, and a buffer (pinned if there is a GPU) through which weights and gradients pass.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:  # noqa: ANN401  torch's options
        super().__init__(groups, **{**options, "fused": False, "foreach": False})
        self._options = {**options, "fused": True}
        self._buffers: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        self._readers: list[Event] = []

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Copy weights and gradients to the host, step, and copy the weights back, some parameters at a time.

        Raises:
            TimeoutError: if a checkpoint does not finish reading the moments in time.
        """
        if closure is not None:
            raise ValueError("a step in host memory takes no closure: compute the gradients before it")
        for reader in self._readers:
            if not reader.wait(READ_S):
                raise TimeoutError(
                    f"a checkpoint still reads the optimizer's moments after {READ_S:g} s: is the disk hanging?"
                )
        self._readers.clear()
        chosen = [(group, each) for group in self.param_groups for each in group["params"] if each.grad is not None]
        for part in _parts(chosen):
            self._step_part(part)
        return None

    def lend(self, read: Event) -> None:
        """Keep the moments unchanged until `read` is set, so that a checkpoint can read them without a copy."""
        self._readers.append(read)

    def _step_part(self, part: list[tuple[dict[str, Any], torch.nn.Parameter]]) -> None:
        inner_groups, copies = [], []
        start = 0
        for group, parameter in part:
            local = local_slice(parameter)[0]
            weights, gradients = (each[start : start + local.numel()].view(local.shape) for each in self._room(part))
            weights.copy_(local, non_blocking=True)
            gradients.copy_(local_slice(parameter.grad)[0], non_blocking=True)
            copy = torch.nn.Parameter(weights)
            copy.grad = gradients
            copies.append(copy)
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            inner_groups.append({"params": [copy], **options})
            start += local.numel()
        inner = torch.optim.AdamW(inner_groups, **self._options)
        for copy, (_, parameter) in zip(copies, part, strict=True):
            inner.state[copy] = self._local_state(parameter)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        inner.step()
        for copy, (_, parameter) in zip(copies, part, strict=True):
            local_slice(parameter)[0].copy_(copy, non_blocking=True)

    def _room(self, part: list[tuple[dict[str, Any], torch.nn.Parameter]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers for the weights and gradients of a part."""
        dtype = part[0][1].dtype
        needed = sum(_elements(parameter) for _, parameter in part)
        if dtype not in self._buffers or len(self._buffers[dtype][0]) < needed:
            pinned = torch.cuda.is_available()
            self._buffers[dtype] = (
                torch.empty(needed, dtype=dtype, pin_memory=pinned),
                torch.empty(needed, dtype=dtype, pin_memory=pinned),
            )
        return self._buffers[dtype]

    def empty_moment(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return zeros in host memory for a moment of a parameter."""
        local = local_slice(parameter)[0]
        host = torch.empty(local.shape, dtype=local.dtype, pin_memory=torch.cuda.is_available()).zero_()
        # `DTensor.from_local` would move the slice to the mesh's device.
        return DTensor(host, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else host  # noqa: SLF001

    def _local_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = self.empty_moment(parameter), self.empty_moment(parameter)
        return {name: local_slice(tensor)[0] for name, tensor in state.items()}


def _elements(parameter: torch.nn.Parameter) -> int:
    return int(local_slice(parameter)[0].numel())


def _parts(
    chosen: Iterable[tuple[dict[str, Any], torch.nn.Parameter]],
) -> Iterator[list[tuple[dict[str, Any], torch.nn.Parameter]]]:
    """Split parameters into parts that have one precision and fit the buffers; a larger parameter is a part of its own."""
    part: list[tuple[dict[str, Any], torch.nn.Parameter]] = []
    filled = 0
    for each in chosen:
        size = _elements(each[1])
        if part and (filled + size > BUFFER_ELEMENTS or each[1].dtype != part[0][1].dtype):
            yield part
            part, filled = [], 0
        part.append(each)
        filled += size
    if part:
        yield part
