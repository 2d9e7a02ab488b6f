"""AdamW in the host's memory: the GPU holds weights and gradients, the host the moments.

FSDP2's own CPUOffloadPolicy moves the weights out as well and brings them back layer by layer in each forward pass; here
they stay, as the weights are what the GPU needs all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Event
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer_svc.engine.local_part import local_part

__all__ = ["OffloadedAdamW"]

BUFFER_ELEMENTS = 1 << 26
"""Weights that pass through the buffers at once, unless one tensor has more: 256 MiB, for which a copy is at full speed."""

READ_S = 1800.0
"""Seconds that a step waits for a checkpoint to read the moments."""


class OffloadedAdamW(torch.optim.AdamW):  # type: ignore[misc]  # torch has no type for it
    """AdamW whose state and step live on the CPU, whatever device the parameters lie on.

    The state stands under the parameters themselves, as that of any optimizer; moments of a DTensor are DTensors of the same
    layout whose local part lies in host memory. Costs 8 bytes of host memory per parameter for the moments, and a buffer
    through which weights and gradients pass; pinned where the parameters are on a GPU.

    Args:
        groups: Parameter groups, as torch.optim.AdamW takes them.
        options: Of torch.optim.AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:  # noqa: ANN401  torch's options
        super().__init__(groups, **{**options, "fused": False, "foreach": False})
        self._options = {**options, "fused": True}
        self._buffers: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        self._readers: list[Event] = []

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Bring the gradients over, step, and send the weights back, some parameters at a time.

        Raises:
            TimeoutError: if a checkpoint that reads the moments is not written in time.
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
        """Leave the moments as they are, so that a checkpoint can read them where they lie, until `read` is set."""
        self._readers.append(read)

    def _step_part(self, part: list[tuple[dict[str, Any], torch.nn.Parameter]]) -> None:
        inner_groups, copies = [], []
        start = 0
        for group, parameter in part:
            local = local_part(parameter)[0]
            weights, gradients = (each[start : start + local.numel()].view(local.shape) for each in self._room(part))
            weights.copy_(local, non_blocking=True)
            gradients.copy_(local_part(parameter.grad)[0], non_blocking=True)
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
            local_part(parameter)[0].copy_(copy, non_blocking=True)

    def _room(self, part: list[tuple[dict[str, Any], torch.nn.Parameter]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers for weights and gradients that hold a part."""
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
        """Room for a moment of a parameter."""
        local = _host_like(local_part(parameter)[0]).zero_()
        return _as_dtensor(local, parameter) if isinstance(parameter, DTensor) else local

    def _local_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = self.empty_moment(parameter), self.empty_moment(parameter)
        return {name: local_part(tensor)[0] for name, tensor in state.items()}


def _elements(parameter: torch.nn.Parameter) -> int:
    return int(local_part(parameter)[0].numel())


def _parts(
    chosen: Iterable[tuple[dict[str, Any], torch.nn.Parameter]],
) -> Iterator[list[tuple[dict[str, Any], torch.nn.Parameter]]]:
    """Parameters of one precision that fit the buffers together; one that is larger alone."""
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


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())


def _as_dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor of another's layout whose local part stays where it is; `from_local` would move it to the mesh's device."""
    return DTensor(local, like._spec, requires_grad=False)  # noqa: SLF001
