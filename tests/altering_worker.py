"""What vLLM's workers can be asked for in tests beside what they are asked for in earnest; forked or spawned."""

from __future__ import annotations

from typing import Any

import torch

from weightsync.vllm.worker import WorkerExtension

__all__ = ["NAME", "AlteringExtension"]

NAME = f"{__name__}.AlteringExtension"


class AlteringExtension(WorkerExtension):
    """Alters live weights behind the back of everyone."""

    model_runner: Any

    def set_one(self, module: str) -> tuple[str, Any]:
        """Alter one value of a live weight; packed ones are packed anew."""
        owner = self.model_runner.model.get_submodule(module)
        if owner.weight.numel():
            owner.weight.data.view(-1)[3] += 1.0
            return ("ok", None)
        inputs = owner.input_size_per_partition
        weight = owner.cpu_linear(torch.eye(inputs, dtype=owner.weight.dtype), owner.weight, None).t().contiguous()
        weight[-1, 3] += 1.0
        owner.weight = torch.nn.Parameter(weight, requires_grad=False)
        owner.quant_method.process_weights_after_loading(owner)
        return ("ok", None)
