"""The report of one training step, how it is collected, and which share of the hardware's peak the step used.

The floating-point operations of a step follow the usual formula: 2 per weight and token forward and twice as many backward, and
attention by the true number of pairs. A token that is forwarded once for many samples counts once, tokens that are left out do
not count, and work that activation checkpointing repeats does not count twice.
"""

from __future__ import annotations

import math
import resource
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any, Self

import torch

from trainer_svc.batch.rows import MicroBatch, TrainingRow
from trainer_svc.batch.shapes import Scalar
from trainer_svc.parallel.balance import TOKENS, Cost
from trainer_svc.parallel.mesh import ALONE, Ranks

LOSS = "step/loss"
"""The name of the loss among the sums. The names of a loss function's own sums have no such prefix."""

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
"""TFLOP/s of dense bf16 matrix products, by a part of the device's name; from the makers' data sheets. The first match counts."""


_NOT_FLAT = frozenset({"seconds", "sums", "measured", "peak_flops", "skipped", "padding_fraction"})
"""Fields of `StepMetrics` that are not reported as a metric under their own name."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The report of one step, over all ranks.

    Attributes:
        loss: The loss, divided by the global weight.
        grad_norm: Norm of the gradient before clipping.
        skipped: True if loss or gradient was not finite and nothing changed.
        sequences: Sequences of the batch.
        tokens: Tokens of the batch, prompts included.
        loss_tokens: Tokens that entered the loss.
        forward_tokens: Tokens that were forwarded; a shared prompt counts once.
        padding_fraction: Share of the cells of attention's blocks that are padding. Elsewhere little is padded (see `cpu_kernels`).
        seconds: Wall-clock seconds per phase: pack, forward, backward, optimizer, total.
        sums: Sums of the loss function by name; ``max_...`` are maxima.
        measured: Metrics that the caller computes from the sums, by name.
        flops: Floating-point operations that the forwarded tokens need, forward and backward; None if unknown.
        peak_flops: Peak FLOP/s of all devices together; None if unknown.
        peak_memory_bytes: Peak memory of this process: tensors on its GPU, or on a CPU its largest resident set so far.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    sequences: int
    tokens: int
    loss_tokens: int
    forward_tokens: int
    micro_batches: int
    padding_fraction: float
    seconds: Mapping[str, float]
    sums: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    flops: float | None = None
    peak_flops: float | None = None
    peak_memory_bytes: float | None = None

    @property
    def throughput(self) -> dict[str, float]:
        """`tokens_per_s`, `forward_tokens_per_s`, `packing_efficiency`, and `mfu` if operations and peak are known."""
        total_s = self.seconds.get("total", 0.0)
        found = {"packing_efficiency": 1.0 - self.padding_fraction}
        if total_s > 0:
            found |= {"tokens_per_s": self.tokens / total_s, "forward_tokens_per_s": self.forward_tokens / total_s}
            if self.flops is not None and self.peak_flops is not None:
                found["mfu"] = self.flops / (total_s * self.peak_flops)
        return found

    def as_flat(self) -> dict[str, float]:
        """Return the finite numbers by name; seconds as ``seconds/name``, measured metrics under their own names.

        Two fields are left out because another metric reports the same: `skipped` (see `skipped_steps`) and `padding_fraction`
        (see `packing_efficiency`).
        """
        flat: dict[str, float] = {f"seconds/{name}": each for name, each in self.seconds.items()}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in _NOT_FLAT and value is not None:
                flat[each.name] = float(value)
        flat |= self.throughput | dict(self.measured)
        return {name: value for name, value in flat.items() if math.isfinite(value)}


class StepRecord:
    """Collects one step's report.

    Args:
        ranks: The ranks that have rows of the batch.
        meter: Measures operations and memory; None: neither is measured.
    """

    def __init__(self, sequences: Sequence[TrainingRow], ranks: Ranks = ALONE, meter: Meter | None = None) -> None:
        self._start = perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._loss: list[Scalar] = []
        self._sums: list[dict[str, Scalar]] = []
        self._ranks = ranks
        self._meter = meter
        if meter is not None:
            meter.restart()
        self._counts = {
            "sequences": len(sequences),
            "tokens": sum(map(len, sequences)),
            "loss_tokens": sum(each.loss_tokens for each in sequences),
        } | dict.fromkeys(("forward_tokens", "micro_batches", "cells", "real_cells", "pairs", "scored"), 0)
        self._totals: dict[str, float] | None = None
        self._grad_norm = 0.0
        self.learning_rate = 0.0
        self.skipped = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. The seconds of phases with the same name add up."""
        start = perf_counter()
        yield
        self._seconds[name] += perf_counter() - start

    def add(self, batch: MicroBatch, loss: Scalar, sums: dict[str, Scalar]) -> None:
        """Add a micro-batch. Its loss and sums stay on the device until the step ends, so that the host does not wait."""
        self._loss.append(loss.detach())
        self._sums.append(sums)
        if batch.sequences:
            self._counts["micro_batches"] += 1
            self._counts["forward_tokens"] += batch.packed_tokens
            self._counts["pairs"] += batch.attention.pairs
            self._counts["scored"] += len(batch.predictors)
            self._counts["cells"] += batch.attention.padded_tokens
            self._counts["real_cells"] += batch.attention.real_tokens

    def gradient(self, norm: float, learning_rate: float, *, finite: bool) -> None:
        """Record the gradient's norm, the learning rate, and whether norm and loss are finite; if not, the step is skipped."""
        self._grad_norm = norm
        self.learning_rate = learning_rate
        self.skipped = not finite

    def totals(self) -> dict[str, float]:
        """Return the sums over micro-batches and ranks, loss and sizes as ``step/<name>``. They are computed once."""
        if self._totals is None:
            counts = {f"step/{name}": float(value) for name, value in self._counts.items()}
            self._totals = self._ranks.combine(counts | self._summed())
        return self._totals

    def _summed(self) -> dict[str, float]:
        """Return loss and sums over this rank's micro-batches, read from the device in one copy."""
        columns: dict[str, list[torch.Tensor]] = defaultdict(list)
        for loss, sums in zip(self._loss, self._sums, strict=True):
            for name, value in {**sums, LOSS: loss}.items():
                columns[name].append(value.double())
        if not columns:
            return {LOSS: 0.0}
        totals = [
            torch.stack(values).max() if name.startswith("max_") else torch.stack(values).sum()
            for name, values in columns.items()
        ]
        return dict(zip(columns, torch.stack(totals).cpu().tolist(), strict=True))

    def finish(self) -> StepMetrics:
        """Return the report."""
        sums = dict(self.totals())
        loss = sums.pop(LOSS)
        counts: dict[str, Any] = {name: int(sums.pop(f"step/{name}")) for name in self._counts}
        cells, real_cells = counts.pop("cells"), counts.pop("real_cells")
        pairs, scored = counts.pop("pairs"), counts.pop("scored")
        if self._meter is not None:
            self._meter.wait()
        self._seconds["total"] = perf_counter() - self._start
        return StepMetrics(
            loss=loss,
            grad_norm=self._grad_norm,
            learning_rate=self.learning_rate,
            skipped=self.skipped,
            padding_fraction=1.0 - real_cells / cells if cells else 0.0,
            seconds=dict(self._seconds),
            **counts,
            sums=sums,
            flops=None if self._meter is None else self._meter.flops(counts["forward_tokens"], pairs, scored),
            peak_flops=None if self._meter is None else self._meter.peak,
            peak_memory_bytes=None if self._meter is None else self._meter.peak_memory(),
        )


@dataclass(frozen=True, slots=True)
class Meter:
    """Measures the operations and the memory of a network's steps.

    Attributes:
        cost: Operations of a forward pass; `TOKENS` if the model's sizes are unknown.
        frozen: Whether the weights have no gradient, as with an adapter. Linear layers then cost as much backward as forward,
            not twice. The adapter's own operations are left out.
        peak: Peak FLOP/s of all devices together; None if unknown.
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
        """Return the meter of a model with this transformers configuration, trained by `devices` processes.

        Without `peak_tflops`, the peak of one device, it is looked up by the device's name.
        """
        peak = _device_peak(device) if peak_tflops is None else peak_tflops * 1e12
        return cls(Cost.of(model), device, frozen, None if peak is None else peak * devices)

    def flops(self, tokens: int, pairs: int, scored: int) -> float | None:
        """Return the operations of a training step, forward and backward, over all ranks.

        Args:
            tokens: Tokens that pass through the layers.
            pairs: Pairs of tokens where one attends to the other.
            scored: Tokens for which the output layer is computed.

        Returns:
            None if the model's sizes are unknown.
        """
        if self.cost == TOKENS:
            return None
        linear = self.cost.token * tokens + self.cost.loss_token * scored
        return (2 if self.frozen else 3) * linear + 3 * self.cost.pair * pairs

    def restart(self) -> None:
        """Measure the peak of memory from now on; only CUDA can."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def wait(self) -> None:
        """Wait until the device has finished, so that the step's time includes all of its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory(self) -> float:
        """Return the most bytes that tensors took on the GPU since `restart`; on a CPU the largest resident set so far."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device))
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(largest if sys.platform == "darwin" else largest * 1024)


def _device_peak(device: torch.device) -> float | None:
    """Return the FLOP/s of bf16 matrix products on a known GPU; None for other devices."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = (tflops * 1e12 for part, tflops in DENSE_BF16_TFLOPS.items() if part in name)
    return next(known, None)
