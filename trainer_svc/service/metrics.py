"""Prometheus metrics of the trainer's steps and checkpoints. The trainer adds to them once a step; nothing is computed for them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from trainer_svc.engine.metrics import StepMetrics

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

STEP_SECONDS = Histogram(
    "sluice_trainer_step_seconds",
    "Time to apply a batch, without its publication.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)
PHASE_SECONDS = Histogram(
    "sluice_trainer_phase_seconds",
    "Seconds of a step by phase: pack, forward, backward, optimizer; wait_batch, wait_push and compare lie between steps.",
    ("phase",),
    buckets=_SECONDS,
)
WAITED_SECONDS = Counter("sluice_trainer_waited_seconds", "Time in which the trainer had no batch.")
SKIPPED_STEPS = Counter("sluice_trainer_skipped_steps", "Optimizer steps skipped: loss or gradient not finite.")
HALVED_BATCHES = Counter(
    "sluice_trainer_halved_batches", "Batches that ran out of memory and were trained with half the token budget."
)
TOKENS = Counter(
    "sluice_trainer_tokens",
    "Tokens of trained batches: all, prompts included; those in the loss; those forwarded, a shared prompt counted once.",
    ("kind",),
)
LAST = {
    name: Gauge(f"sluice_trainer_{name}", text)
    for name, text in {
        "loss": "Loss of the last step.",
        "grad_norm": "Norm of the gradient of the last step, before clipping.",
        "learning_rate": "Learning rate of the last step.",
        "peak_memory_bytes": "Peak memory of the process: tensors on its GPU in the last step, or on a CPU its largest resident set.",
    }.items()
}
LAST_STEP = Gauge(
    "sluice_trainer_last_step_timestamp_seconds", "Unix time at which the last step had ended; 0 before it."
)
CHECKPOINT = Gauge(
    "sluice_trainer_checkpoint_timestamp_seconds", "Unix time at which the last checkpoint was on disk; 0 before it."
)
CHECKPOINTS = Counter("sluice_trainer_checkpoints", "Checkpoints by outcome.", ("outcome",))


def observe_step(metrics: StepMetrics | None, between: Mapping[str, float]) -> None:
    """Add a step to the metrics.

    Args:
        metrics: Report of the optimizer steps; None if nothing was left to train.
        between: Seconds by phase, for phases between the steps.
    """
    LAST_STEP.set(time.time())
    phases = dict(between)
    if metrics is not None:
        phases |= {name: seconds for name, seconds in metrics.seconds.items() if name != "total"}
        HALVED_BATCHES.inc(metrics.measured.get("token_budget_halved", 0.0))
        for kind, tokens in (
            ("all", metrics.tokens),
            ("loss", metrics.loss_tokens),
            ("forwarded", metrics.forward_tokens),
        ):
            TOKENS.labels(kind).inc(tokens)
        for name, gauge in LAST.items():
            value = getattr(metrics, name)
            if value is not None and math.isfinite(value):
                gauge.set(value)
    for name, seconds in phases.items():
        PHASE_SECONDS.labels(name).observe(seconds)


def observe_checkpoint(*, written: bool) -> None:
    """Count a checkpoint, as written or failed."""
    CHECKPOINTS.labels("written" if written else "failed").inc()
    if written:
        CHECKPOINT.set(time.time())
