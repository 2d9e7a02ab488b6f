"""AdamW in the host's memory: the GPU holds weights and gradients, the host the moments and a copy to step on.

FSDP2's own CPUOffloadPolicy moves the weights out as well and brings them back layer by layer in each forward pass; here
they stay, as the weights are what the GPU needs all the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer_svc.engine.local_part import local_part

__all__ = ["OffloadedAdamW"]


class OffloadedAdamW(torch.optim.AdamW):  # type: ignore[misc]  # torch has no type for it
    """AdamW whose state and step live on the CPU, whatever device the parameters lie on.

    The state stands under the parameters themselves, as that of any optimizer; moments of a DTensor are DTensors of the same
    layout whose local part lies in host memory. Costs 16 bytes of host memory per parameter: two moments, the stepped copy
    and its gradient, pinned where the parameters are on a GPU.

    Args:
        groups: Parameter groups, as torch.optim.AdamW takes them.
        options: Of torch.optim.AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:  # noqa: ANN401  torch's options
        super().__init__(groups, **{**options, "fused": False, "foreach": False})
        self._options = {**options, "fused": True}
        self._copies: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Bring the gradients over, step, and send the weights back."""
        if closure is not None:
            raise ValueError("a step in host memory takes no closure: compute the gradients before it")
        chosen = [(group, each) for group in self.param_groups for each in group["params"] if each.grad is not None]
        for _, parameter in chosen:
            copy = self._copy(parameter)
            copy.grad = _host_like(copy) if copy.grad is None else copy.grad
            copy.grad.copy_(local_part(parameter.grad)[0], non_blocking=True)
            copy.copy_(local_part(parameter)[0], non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        inner = torch.optim.AdamW([self._inner_group(group, each) for group, each in chosen], **self._options)
        for _, parameter in chosen:
            inner.state[self._copy(parameter)] = self._local_state(parameter)
        inner.step()
        for _, parameter in chosen:
            local_part(parameter)[0].copy_(self._copy(parameter), non_blocking=True)
        return None

    def empty_moment(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Room for a moment of a parameter."""
        local = _host_like(local_part(parameter)[0]).zero_()
        return _as_dtensor(local, parameter) if isinstance(parameter, DTensor) else local

    def _copy(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if parameter not in self._copies:
            self._copies[parameter] = torch.nn.Parameter(_host_like(local_part(parameter)[0]))
        return self._copies[parameter]

    def _inner_group(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> dict[str, Any]:
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        return {"params": [self._copy(parameter)], **options}

    def _local_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = self.empty_moment(parameter), self.empty_moment(parameter)
        return {name: local_part(tensor)[0] for name, tensor in state.items()}


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())


def _as_dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor of another's layout whose local part stays where it is; `from_local` would move it to the mesh's device."""
    return DTensor(local, like._spec, requires_grad=False)  # noqa: SLF001
