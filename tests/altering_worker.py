"""Further calls to vLLM's workers, forked or spawned, that only tests make."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from weightsync.vllm import live_check
from weightsync.vllm.worker import WorkerExtension, why_no_patch

__all__ = ["NAME", "AlteringExtension"]

NAME = f"{__name__}.AlteringExtension"


class AlteringExtension(WorkerExtension):
    """Alters live weights without telling the rest of the engine."""

    model_runner: Any
    weight_transfer_engine: Any

    def set_one(self, module: str) -> tuple[str, Any]:
        """Alter one value of a live weight. If the weight is packed, pack it again."""
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

    def set_one_of_an_expert(self, module: str, parameter: str, expert: int, part: int, parts: int) -> tuple[str, Any]:
        """Alter one packed value of an expert, in the second block of rows of one of the tensors that a parameter is made of."""
        packed = getattr(self.model_runner.model.get_submodule(module), parameter).data[expert]
        packed.view(parts, -1)[part].view(2, -1)[1, 5] += 1.0
        return ("ok", None)

    def compare_in_pieces(self, octets: int) -> tuple[str, Any]:
        """Compare live weights in pieces of `octets` bytes, because only large weights are compared in pieces."""
        live_check._PIECE_BYTES = octets
        return ("ok", None)

    def pack_by_zentorch(self, yes: bool) -> tuple[str, Any]:
        """Mark all experts as packed by another library, as on some processors."""
        for module in self.model_runner.model.modules():
            if isinstance(module, UnquantizedFusedMoEMethod):
                module.moe_kernel.fused_experts._use_zentorch = yes
        return ("ok", None)

    def patched(self, paths: list[str]) -> tuple[str, Any]:
        """Return why the model cannot take patches."""
        engine = self.weight_transfer_engine
        return ("ok", why_no_patch(engine.model, engine.plan(paths)))
