"""Settings whose `auto` is decided once for the whole run: the precision of both sides, and how adapters travel.

The engine must sample from the weights that the trainer computes with. An engine that keeps bfloat16 weights beside a trainer
that computes in float32 never sees an update smaller than half a bfloat16 step: the policy stands still, or drifts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from sluice.config.sections import CommonConfig, Section

__all__ = ["decided"]

_Run = TypeVar("_Run", bound=CommonConfig)

_TRAINED = ("float32", "bfloat16")
"""Precisions that a trainer computes in; an engine knows more."""


def decided(run: _Run, *, cuda: bool) -> tuple[_Run, tuple[str, ...]]:
    """Replace every `auto` that concerns both the trainer and the engine.

    A table of a package that is not installed is left alone, and so is a setting that was given.

    Args:
        run: The settings, with the dimensions of the allocation.
        cuda: Whether there is a CUDA device; services on other hosts are assumed to have the same kind.

    Returns:
        The settings, and one line per decision: the setting, its value and the reason.
    """
    trainer, rollout = getattr(run, "trainer", None), getattr(run, "rollout", None)
    if not (isinstance(trainer, Section) and isinstance(rollout, Section)):
        return run, ()
    notes: list[str] = []
    precision = _precision(trainer, rollout, cuda=cuda)
    merge = _merge(trainer, rollout, cuda=cuda)
    updates = {
        "trainer": _replaced(trainer, "trainer", precision["trainer"] | merge, notes),
        "rollout": _replaced(rollout, "rollout", precision["rollout"], notes),
    }
    return run.model_copy(update=updates), tuple(notes)


def _precision(trainer: Any, rollout: Any, *, cuda: bool) -> Mapping[str, dict[str, tuple[object, str]]]:  # noqa: ANN401 - tables of packages that this one does not import
    """Return the precision of forward pass, published weights and engine, with reasons, where they are left open."""
    computes, sampled = getattr(trainer, "dtype", ""), getattr(rollout, "dtype", "")
    published = getattr(trainer, "publish_dtype", "")
    if not getattr(rollout, "follow_weights", False) or "" in (computes, sampled, published):
        return {"trainer": {}, "rollout": {}}
    reason = f"rollout.dtype is {sampled}"
    if computes == "auto":
        if sampled in _TRAINED:
            computes = sampled
        else:
            on_cuda = cuda and trainer.device != "cpu"
            computes = "bfloat16" if on_cuda else "float32"
            reason = f"the trainer is on {'CUDA' if on_cuda else 'a CPU'}"
    engine = computes if sampled == "auto" else sampled
    same = f"the trainer computes in {computes}, and both sides must use the same weights"
    return {
        "trainer": {"dtype": (computes, reason), "publish_dtype": (engine, f"the engine holds {engine}")},
        "rollout": {"dtype": (engine, same)},
    }


def _merge(trainer: Any, rollout: Any, *, cuda: bool) -> dict[str, tuple[object, str]]:  # noqa: ANN401 - as above
    """Return whether an adapter is published merged, with the reason, where that is left open."""
    lora = getattr(trainer, "lora", None)
    if not getattr(lora, "rank", 0):
        return {}
    on_cuda = cuda and (rollout.engine == "vllm" or rollout.device != "cpu")
    if on_cuda:
        return {"lora.merge": (False, "the engine is on CUDA, where it serves adapters at full speed")}
    return {"lora.merge": (True, "the engine is on a CPU, where it samples with an adapter at a third of its speed")}


def _replaced(table: Section, path: str, values: Mapping[str, tuple[object, str]], notes: list[str]) -> Section:
    """Return the table with each value in place of an `auto`, and note each replacement."""
    updates: dict[str, object] = {}
    for name, (value, reason) in values.items():
        inner, _, rest = name.partition(".")
        held = getattr(table, inner)
        if rest:
            updates[inner] = _replaced(held, f"{path}.{inner}", {rest: (value, reason)}, notes)
        elif held == "auto":
            updates[inner] = value
            shown = str(value).lower() if isinstance(value, bool) else value
            notes.append(f"{path}.{inner} = {shown} (auto: {reason})")
    return table.model_copy(update=updates)
