"""Muon for matrices that are cut over processes: the same step as for a whole matrix, to the bit of its direction.

torch.optim.Muon runs on DTensors too, but its matrix products are then bfloat16 sums in another order for each layout:
2-4% of a step's length between one process and two. Here each matrix is gathered, one at a time, and every process
orthogonalises the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer_svc.engine.local_part import local_part

__all__ = ["ShardedMuon"]


class ShardedMuon(torch.optim.Muon):  # type: ignore[misc]  # torch has no type for it
    """torch.optim.Muon over plain matrices and DTensors.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks"; step lengths of Liu et al., 2502.16982.
    """

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients. Every process that holds a part of a matrix calls this at the same time."""
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
        local, offsets = local_part(parameter)
        places = tuple(slice(begin, begin + size) for begin, size in zip(offsets, local.shape, strict=True))
        local.mul_(1 - group["lr"] * group["weight_decay"]).add_(change[places])


def _whole_step(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """What torch's Muon adds to a matrix for this update, momentum being in it already."""
    matrix = torch.nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    fixed = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    options = {name: group[name] for name in fixed}
    torch.optim.Muon([matrix], weight_decay=0.0, momentum=0.0, nesterov=False, **options).step()
    return matrix.detach()
