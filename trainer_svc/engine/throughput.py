"""How much a step computes, and what share of the hardware's peak that is.

Operations are those that the step's own tokens need, by the usual formula: 2 per weight and token forward and twice that
backward, and attention by the true number of pairs. What is forwarded once for many samples counts once, what is left
out not at all, and what activation checkpointing computes again not twice: none of them makes the figure look better.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Self

import torch

from trainer_svc.parallel.balance import TOKENS, Cost

__all__ = ["Meter", "Work", "device_peak"]

DENSE_BF16_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H20": 148.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
"""TFLOP/s of bf16 matrix products without sparsity, by a part of the device's name; from the makers' data sheets.
The first that fits counts."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a step forwarded, over all ranks.

    Attributes:
        tokens: Tokens through the layers.
        pairs: Tokens that attend to tokens.
        scored: Tokens whose output layer is computed.
    """

    tokens: float
    pairs: float
    scored: float


@dataclass(frozen=True, slots=True)
class Meter:
    """What a network's steps are measured by.

    Attributes:
        cost: Operations of a forward pass; `TOKENS` where the model's sizes are unknown.
        device: Where memory is measured.
        frozen: Whether the weights have no gradient, as with an adapter: a backward pass then costs as much as a forward
            pass in the linear layers, not twice. The adapter's own operations are left out.
        peak: FLOP/s of all devices together; None: unknown.
    """

    cost: Cost
    device: torch.device
    frozen: bool = False
    peak: float | None = None

    @classmethod
    def of(
        cls,
        model: object,
        device: torch.device,
        *,
        frozen: bool = False,
        devices: int = 1,
        peak_tflops: float | None = None,
    ) -> Self:
        """The meter of a model.

        Args:
            model: Its configuration, of transformers.
            device: Where it is computed.
            frozen: See the attribute.
            devices: Processes that train it.
            peak_tflops: Peak of one device; None looks it up.
        """
        peak = device_peak(device) if peak_tflops is None else peak_tflops * 1e12
        return cls(Cost.of(model), device, frozen, None if peak is None else peak * devices)

    def flops(self, work: Work) -> float | None:
        """Operations of a training step, forward and backward; None where the model's sizes are unknown."""
        if self.cost == TOKENS:
            return None
        linear = self.cost.token * work.tokens + self.cost.loss_token * work.scored
        return (2 if self.frozen else 3) * linear + 3 * self.cost.pair * work.pairs

    def restart(self) -> None:
        """Measure the peak of memory from now on, where that can be."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def wait(self) -> None:
        """Until the device has done what it was given, so that the step's time holds all of its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory(self) -> float:
        """Bytes: the most that tensors took on the GPU since `restart`; on a CPU the largest resident set so far."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device))
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(largest if sys.platform == "darwin" else largest * 1024)


def device_peak(device: torch.device) -> float | None:
    """FLOP/s of bf16 matrix products on a known GPU; None for others, and for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = (tflops * 1e12 for part, tflops in DENSE_BF16_TFLOPS.items() if part in name)
    return next(known, None)
