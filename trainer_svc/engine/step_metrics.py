"""What one training step reports, and how it is collected."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass, fields
from time import perf_counter

import torch

from trainer_svc.engine.batch import MicroBatch, Sequence
from trainer_svc.engine.shapes import Scalar
from trainer_svc.objectives.diagnostics import finish
from trainer_svc.objectives.terms import GlobalCounts

__all__ = ["StepMetrics", "StepRecord"]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Report of one step. Fields that were not measured are None.

    Means over tokens cover the forwarded loss tokens: those of sequences with a non-zero advantage.

    Attributes:
        loss: The objective's value.
        grad_norm: Norm of the gradient before clipping.
        learning_rate: The step's learning rate.
        skipped: True if loss or gradient was not finite and nothing changed.
        sequences: Sequences of the batch.
        zero_advantage_sequences: Those among them whose advantages were all zero.
        tokens: Tokens of the batch, prompts included.
        loss_tokens: Tokens that entered the loss.
        forward_tokens: Tokens that were forwarded after folding, trimming and leaving out.
        micro_batches: Number of forward passes.
        padding_fraction: Share of attention's cells that held no token; nothing else is padded.
        dropped_tokens: Tokens taken out of the loss, by cause.
        advantage_positive: Share of the loss tokens with an advantage above zero.
        advantage_negative: Share below zero.
        mismatch_kl: KL estimate between trainer and engine at the tokens, in nats.
        max_abs_log_difference: Largest difference of the two log-probabilities, in nats.
        effective_sample_size: Of the importance weights, as a share of the tokens.
        chi_square: Chi-square divergence of the importance weights.
        clip_fraction_low: Share of tokens clipped or masked at the lower bound.
        clip_fraction_high: Share of tokens clipped or truncated at the upper bound.
        entropy: Mean entropy, in nats.
        kl: Mean KL estimate to the reference policy, in nats.
        seconds: Wall-clock seconds per phase: pack, forward, backward, optimizer, total.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    sequences: int
    zero_advantage_sequences: int
    tokens: int
    loss_tokens: int
    forward_tokens: int
    micro_batches: int
    padding_fraction: float
    dropped_tokens: Mapping[str, int]
    advantage_positive: float
    advantage_negative: float
    seconds: Mapping[str, float]
    mismatch_kl: float | None = None
    max_abs_log_difference: float | None = None
    effective_sample_size: float | None = None
    chi_square: float | None = None
    clip_fraction_low: float | None = None
    clip_fraction_high: float | None = None
    entropy: float | None = None
    kl: float | None = None

    def as_flat(self) -> dict[str, float]:
        """Finite numbers by name; entries of tables as ``table/name``."""
        flat: dict[str, float] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            entries = (
                {f"{field.name}/{key}": each for key, each in value.items()}
                if isinstance(value, Mapping)
                else {field.name: value}
            )
            flat |= {name: float(each) for name, each in entries.items() if each is not None and math.isfinite(each)}
        return flat


class StepRecord:
    """Collects one step's report.

    Args:
        sequences: The batch as it was given.
    """

    def __init__(self, sequences: Rows[Sequence]) -> None:
        self._start = perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._loss: list[Scalar] = []
        self._sums: list[dict[str, Scalar]] = []
        self._sequences = sequences
        self._zero_advantage = 0
        self._shares = (0.0, 0.0)
        self._counts = GlobalCounts()
        self._dropped: Mapping[str, int] = {}
        self._forward_tokens = self._cells = self._real_cells = 0
        self._grad_norm = 0.0
        self.learning_rate = 0.0
        self.skipped = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; phases of one name add up."""
        start = perf_counter()
        yield
        self._seconds[name] += perf_counter() - start

    def count(self, kept: Rows[Sequence], counts: GlobalCounts, dropped: Mapping[str, int]) -> None:
        """Take in what the batch consists of."""
        self._counts, self._dropped = counts, dropped
        trained = [each.advantages[each.loss_mask] for each in kept]
        self._zero_advantage = sum(not bool(values.any()) for values in trained)
        if counts.tokens:
            values = torch.cat(trained)
            self._shares = (float((values > 0).sum()) / counts.tokens, float((values < 0).sum()) / counts.tokens)

    def add(self, batch: MicroBatch, loss: Scalar, sums: dict[str, Scalar]) -> None:
        """Take in one micro-batch; tensors stay on the device until the step ends, so that it need not wait."""
        self._loss.append(loss)
        self._sums.append(sums)
        self._forward_tokens += batch.packed_tokens
        self._cells += batch.attention.padded_tokens
        self._real_cells += batch.attention.real_tokens

    def gradient(self, norm: float, learning_rate: float) -> None:
        """Take in the gradient's norm and decide whether the step may be applied."""
        self._grad_norm = norm
        self.learning_rate = learning_rate
        self.skipped = not (math.isfinite(norm) and math.isfinite(self._total_loss()))

    def _total_loss(self) -> float:
        return float(torch.stack(self._loss).double().sum()) if self._loss else 0.0

    def finish(self) -> StepMetrics:
        """The report."""
        totals: dict[str, float] = {}
        for name in {name for sums in self._sums for name in sums}:
            values = torch.stack([sums[name].double() for sums in self._sums])
            totals[name] = float(values.max() if name.startswith("max_") else values.sum())
        self._seconds["total"] = perf_counter() - self._start
        return StepMetrics(
            loss=self._total_loss(),
            grad_norm=self._grad_norm,
            learning_rate=self.learning_rate,
            skipped=self.skipped,
            sequences=len(self._sequences),
            zero_advantage_sequences=self._zero_advantage,
            tokens=sum(map(len, self._sequences)),
            loss_tokens=self._counts.tokens,
            forward_tokens=self._forward_tokens,
            micro_batches=len(self._loss),
            padding_fraction=1.0 - self._real_cells / self._cells if self._cells else 0.0,
            dropped_tokens=dict(self._dropped),
            advantage_positive=self._shares[0],
            advantage_negative=self._shares[1],
            seconds=dict(self._seconds),
            **finish(totals),
        )
