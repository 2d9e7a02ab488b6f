"""Updates of the policy on one device: their speed by length, their memory against the estimate, and running out of memory."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.case import Case
from benchmarks.gpu.parts import Figures, Measurements, NotRunError
from sluice.config import CommonConfig, ConfigError
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.metrics import StepMetrics
from trainer_svc.engine.out_of_memory import MemoryShortError
from trainer_svc.update.policy import PolicyUpdate, load_frozen

GRPO = {"preset": "grpo"}

REFERENCE = {"objective": GRPO | {"kl_coef": 0.01}, "reference": {"model": "base"}}
CRITIC = {"objective": {"preset": "ppo"}}

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "activations kept": {"gradient_checkpointing": False},
    "moments on the host": {"optimizer_offload": True},
    "muon": {"optimizer": "muon"},
    "an adapter of rank 16": {"lora": {"rank": 16}},
    "a reference": REFERENCE,
    "a critic of its own": CRITIC,
    "float32": {"dtype": "float32"},
}
"""Settings of the trainer whose memory is compared with the estimate."""


@dataclass(frozen=True, slots=True)
class Trained:
    """An update of the policy with its settings, and its memory after loading.

    Attributes:
        loaded_bytes: Tensors on the device after the networks were loaded; None on a CPU.
    """

    update: PolicyUpdate
    config: TrainerConfig
    loaded_bytes: int | None


def settings(case: Case, longest: int = 0, **given: Any) -> TrainerConfig:  # noqa: ANN401 - settings of the trainer
    """Return the trainer's settings: the defaults, except for `given`, with a token budget of at least the longest row."""
    return TrainerConfig(
        **{
            "objective": GRPO,
            "device": case.device.type,
            "token_budget": max(case.shape.token_budget, longest),
            **given,
        }
    )


def load(case: Case, config: TrainerConfig) -> Trained:
    """Load the networks of an update, as the trainer does at its start."""
    model = case.model()
    begun = _allocated(case)
    update = PolicyUpdate.load(config, model, frozen=load_frozen(config, model))
    held = _allocated(case)
    return Trained(update, config, None if held is None or begun is None else held - begun)


def estimated(case: Case, config: TrainerConfig) -> dict[str, Any]:
    """Return the trainer's own estimate of its memory on the device, in bytes and in words."""
    held = config.footprint(CommonConfig(model=str(case.model())), cuda=case.device.type == "cuda")
    if held is None:
        return {"estimate_bytes": None}
    return {"estimate_bytes": held.device, "estimate": held.parts}


def _allocated(case: Case) -> int | None:
    return int(torch.cuda.memory_allocated(case.device)) if case.device.type == "cuda" else None


def _peak(case: Case, metrics: StepMetrics) -> int | None:
    """Return the peak bytes of tensors on the device; None on a CPU, where a step reports the resident set instead."""
    peak = metrics.peak_memory_bytes
    return None if case.device.type != "cuda" or peak is None else int(peak)


def train(case: Case, trained: Trained, rows: Sequence[TrainingRow]) -> dict[str, Any]:
    """Repeat the update on the same rows; return medians. The first update, which allocates memory, does not count."""
    first = trained.update.apply(rows).metrics
    steps = [trained.update.apply(rows).metrics for _ in range(case.shape.rounds)]
    flat = [each.as_flat() for each in steps]

    def middle(name: str, digits: int) -> float | None:
        return float(f"{median(each[name] for each in flat):.{digits}g}") if name in flat[0] else None

    phases = [name for name in flat[0] if name.startswith("seconds/")]
    network = trained.update.engine.network
    return {
        "tokens_per_s": middle("tokens_per_s", 4),
        "mfu": middle("mfu", 3),
        "peak_bytes": max((peak for each in steps if (peak := _peak(case, each)) is not None), default=None),
        "seconds_per_phase": {name.partition("/")[2]: middle(name, 4) for name in phases},
        "first_s": round(first.seconds["total"], 3),
        "micro_batches": first.micro_batches,
        "tokens": first.tokens,
        "loss": first.loss,
        "grad_norm": first.grad_norm,
        "finite": not any(each.skipped for each in (first, *steps)) and math.isfinite(first.loss),
        "attention": "varlen" if network.varlen else "blocks",
        "precision": str(network.compute_dtype).removeprefix("torch."),
    }


# Parts.


def speed(case: Case) -> Measurements:
    """Measure updates on sequences of each length, once with activations that are computed again and once with them kept."""
    for tokens in case.shape.lengths:
        for recompute in (True, False):
            name = f"{tokens} tokens, activations {'recomputed' if recompute else 'kept'}"
            yield name, partial(_speed, case, tokens, gradient_checkpointing=recompute)


def compiled(case: Case) -> Measurements:
    """Measure the first length with compiled layers; the first update compiles."""
    tokens = case.shape.lengths[0]
    yield f"{tokens} tokens, compiled", partial(_speed, case, tokens, gradient_checkpointing=True, compile=True)


def _speed(case: Case, tokens: int, **given: Any) -> Figures:  # noqa: ANN401 - settings of the trainer
    config = settings(case, tokens, **given)
    try:
        config.check_compiler()
    except ConfigError as error:
        raise NotRunError(str(error)) from error
    guess = estimated(case, config)
    try:
        return {"fits": True, **train(case, load(case, config), case.batch(tokens)), **guess}
    except (torch.OutOfMemoryError, MemoryShortError) as error:
        return {"fits": False, "error": str(error).splitlines()[0], **guess}


def memory(case: Case) -> Measurements:
    """Compare the estimate with PyTorch's peak of allocated memory, for each of the settings."""
    for name, given in SETTINGS.items():
        yield name, partial(_memory, case, settings(case, **given))
    long = max(case.shape.lengths[:2])
    yield "a row of twice the budget", partial(_memory, case, settings(case, token_budget=long // 2), long)


def _memory(case: Case, config: TrainerConfig, tokens: int | None = None) -> Figures:
    guess = estimated(case, config)
    trained = load(case, config)
    tokens = tokens or min(case.shape.lengths)
    count = max(2, 2 * config.token_budget // tokens)
    rows = [replace(row, reward=float(number % 2)) for number, row in enumerate(case.rows(tokens, count))]
    found = train(case, trained, rows)
    held = _allocated(case)
    peak, estimate = found["peak_bytes"], guess["estimate_bytes"]
    return {
        "peak_bytes": peak,
        "loaded_bytes": trained.loaded_bytes,
        "held_bytes": held,
        "above_held_bytes": None if peak is None or held is None else peak - held,
        "estimate_over_peak": None if not peak or estimate is None else round(estimate / peak, 3),
        "token_budget": config.token_budget,
        "longest_row": tokens,
        "finite": found["finite"],
        "seconds": found["seconds_per_phase"].get("total"),
        **guess,
    }


def out_of_memory(case: Case) -> Measurements:
    """Limit the device's memory so that half of the token budget fits but the whole does not, and make updates.

    On a CPU, where no memory is counted, the layers raise the device's error for more tokens than half the budget.
    """
    yield "the budget does not fit, half of it does", partial(_out_of_memory, case)


def _out_of_memory(case: Case) -> Figures:
    tokens = min(case.shape.lengths) // 2
    budget = 2 * max(case.shape.token_budget // 2, tokens)
    rows = case.rows(tokens, budget // tokens)
    whole, half = settings(case, token_budget=budget), settings(case, token_budget=budget // 2)
    needs_whole, _ = _reserved(case, whole, rows)
    needs_half, expected = _reserved(case, half, rows)
    trained = load(case, whole)
    trained.update.apply(_few(rows))  # the first step allocates the optimizer's moments
    limit = None if needs_whole is None or needs_half is None else (needs_whole + needs_half) // 2
    with _short_of_memory(case, trained, limit, budget // 2):
        outcome, loss, micro_batches = "trained", None, None
        try:
            metrics = trained.update.apply(rows).metrics
            loss, micro_batches = metrics.loss, metrics.micro_batches
        except MemoryShortError as error:
            outcome = str(error)
        gc.collect()
        left = _allocated(case)
        # Whether or not that batch was trained, one that fits is trained afterwards.
        after = trained.update.apply(_few(rows)).metrics
    return {
        "outcome": outcome,
        "loss": loss,
        "expected_loss": expected,
        "micro_batches": micro_batches,
        "limit_bytes": limit,
        "whole_budget_bytes": needs_whole,
        "half_budget_bytes": needs_half,
        "held_after_bytes": left,
        "trains_after": math.isfinite(after.loss) and not after.skipped,
    }


def _reserved(case: Case, config: TrainerConfig, rows: Sequence[TrainingRow]) -> tuple[int | None, float]:
    """Apply a second update. Return the memory that PyTorch reserved on the device (None on a CPU), and the loss."""
    if case.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(case.device)
    trained = load(case, config)
    trained.update.apply(_few(rows))
    loss = trained.update.apply(rows).metrics.loss
    peak = int(torch.cuda.max_memory_reserved(case.device)) if case.device.type == "cuda" else None
    del trained
    gc.collect()
    if case.device.type == "cuda":
        torch.cuda.empty_cache()
    return peak, loss


def _few(rows: Sequence[TrainingRow]) -> Sequence[TrainingRow]:
    return rows[: max(1, len(rows) // 4)]


@contextmanager
def _short_of_memory(case: Case, trained: Trained, limit: int | None, tokens: int) -> Iterator[None]:
    """Limit the memory of the device to `limit` bytes; on a CPU let at most `tokens` tokens pass through the model."""
    if limit is not None:
        whole = torch.cuda.get_device_properties(case.device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / whole, case.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, case.device)
        return

    def refuse(_: torch.nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
        if given["position_ids"].shape[-1] > tokens:
            raise torch.OutOfMemoryError(f"more than {tokens} tokens")

    hook = trained.update.engine.network.model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
