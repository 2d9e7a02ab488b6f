"""What one training step reports, and how it is collected."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import perf_counter

import torch

from trainer_svc.batch.rows import MicroBatch, Sequence
from trainer_svc.batch.shapes import Scalar
from trainer_svc.engine.throughput import Meter, Work
from trainer_svc.parallel.ranks import ALONE, Ranks

__all__ = ["StepMetrics", "StepRecord"]


LOSS = "step/loss"
"""The loss among the sums; a loss function's own names have no such prefix."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Report of one step, over all ranks.

    Attributes:
        loss: The loss, divided by the global weight.
        grad_norm: Norm of the gradient before clipping.
        learning_rate: The step's learning rate.
        skipped: True if loss or gradient was not finite and nothing changed.
        sequences: Sequences of the batch.
        tokens: Tokens of the batch, prompts included.
        loss_tokens: Tokens that entered the loss.
        forward_tokens: Tokens that were forwarded after folding, trimming and leaving out.
        micro_batches: Number of forward passes.
        padding_fraction: Share of attention's cells that held no token; nothing else is padded.
        seconds: Wall-clock seconds per phase: pack, forward, backward, optimizer, total.
        sums: What the loss function summed up, by name; ``max_...`` are maxima.
        measured: What whoever trains makes of them, by name.
        flops: Floating-point operations that the forwarded tokens need, forward and backward; None if unknown.
        peak_flops: FLOP/s that all devices together could make; None if unknown.
        peak_memory_bytes: Of the process that reports: tensors on its GPU, or its largest resident set so far.
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
        """`tokens_per_s` and `forward_tokens_per_s`, `packing_efficiency`, and `mfu` where its parts are known."""
        total_s = self.seconds.get("total", 0.0)
        found = {"packing_efficiency": 1.0 - self.padding_fraction}
        if total_s > 0:
            found |= {
                "tokens_per_s": self.tokens / total_s,
                "forward_tokens_per_s": self.forward_tokens / total_s,
            }
            if self.flops is not None and self.peak_flops is not None:
                found["mfu"] = self.flops / (total_s * self.peak_flops)
        return found

    def as_flat(self) -> dict[str, float]:
        """Finite numbers by name; seconds as ``seconds/name``, what was measured under its own name."""
        flat: dict[str, float] = {f"seconds/{name}": each for name, each in self.seconds.items()}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("seconds", "sums", "measured", "peak_flops") and value is not None:
                flat[each.name] = float(value)
        flat |= self.throughput | dict(self.measured)
        return {name: value for name, value in flat.items() if math.isfinite(value)}


class StepRecord:
    """Collects one step's report.

    Args:
        sequences: This rank's share of the batch as it was given.
        ranks: All ranks that have a share.
        meter: What the network's training steps are measured by; None: they are not.
    """

    def __init__(self, sequences: Rows[Sequence], ranks: Ranks = ALONE, meter: Meter | None = None) -> None:
        self._start = perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._loss: list[Scalar] = []
        self._sums: list[dict[str, Scalar]] = []
        self._sequences = sequences
        self._ranks = ranks
        self._meter = meter
        if meter is not None:
            meter.restart()
        self._pairs = self._scored = 0
        self._forward_tokens = self._cells = self._real_cells = self._micro_batches = 0
        self._totals: dict[str, float] | None = None
        self._grad_norm = 0.0
        self.learning_rate = 0.0
        self.skipped = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; phases of one name add up."""
        start = perf_counter()
        yield
        self._seconds[name] += perf_counter() - start

    def add(self, batch: MicroBatch, loss: Scalar, sums: dict[str, Scalar]) -> None:
        """Take in one micro-batch; tensors stay on the device until the step ends, so that it need not wait."""
        self._loss.append(loss.detach())
        self._sums.append(sums)
        if not batch.sequences:
            return
        self._micro_batches += 1
        self._forward_tokens += batch.packed_tokens
        self._pairs += batch.attention.pairs
        self._scored += len(batch.predictors)
        self._cells += batch.attention.padded_tokens
        self._real_cells += batch.attention.real_tokens

    def gradient(self, norm: float, learning_rate: float, *, finite: bool) -> None:
        """Take in the gradient's norm, and whether it and the loss are finite, so that the step may be applied."""
        self._grad_norm = norm
        self.learning_rate = learning_rate
        self.skipped = not finite

    def totals(self) -> dict[str, float]:
        """Sums over micro-batches and ranks, loss and sizes among them as ``step/<name>``; computed once."""
        if self._totals is None:
            summed = self._summed()
            own = {
                "loss": summed.pop(LOSS),
                "sequences": len(self._sequences),
                "tokens": sum(map(len, self._sequences)),
                "loss_tokens": sum(int(each.loss_mask.sum()) for each in self._sequences),
                "forward_tokens": self._forward_tokens,
                "micro_batches": self._micro_batches,
                "cells": self._cells,
                "real_cells": self._real_cells,
                "pairs": self._pairs,
                "scored": self._scored,
            }
            self._totals = self._ranks.combine({f"step/{name}": value for name, value in own.items()} | summed)
        return self._totals

    def _summed(self) -> dict[str, float]:
        """The loss and the loss function's sums over this rank's micro-batches, read from the device at once."""
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
        """The report."""
        totals = dict(self.totals())
        cells, real_cells, loss = totals.pop("step/cells"), totals.pop("step/real_cells"), totals.pop("step/loss")
        forward_tokens = int(totals.pop("step/forward_tokens"))
        work = Work(forward_tokens, totals.pop("step/pairs"), totals.pop("step/scored"))
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
            sequences=int(totals.pop("step/sequences")),
            tokens=int(totals.pop("step/tokens")),
            loss_tokens=int(totals.pop("step/loss_tokens")),
            forward_tokens=forward_tokens,
            micro_batches=int(totals.pop("step/micro_batches")),
            sums=totals,
            flops=None if self._meter is None else self._meter.flops(work),
            peak_flops=None if self._meter is None else self._meter.peak,
            peak_memory_bytes=None if self._meter is None else self._meter.peak_memory(),
        )
