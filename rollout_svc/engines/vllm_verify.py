"""Asks vLLM's workers whether their live weights are those of a version.

Weights are compared piece by piece, between steps, never in a pause.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from rollout_svc.engines.base import EngineError
from rollout_svc.engines.vllm_types import Llm
from rollout_svc.engines.vllm_weights import WeightFiles, step

__all__ = ["Difference", "verify"]

PIECE_S = 0.01
"""Seconds that one look may keep the workers from sampling; at least one piece of a tensor is compared."""

BREATH_S = 0.02
"""Seconds between two looks, for the engine's steps."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What a comparison found.

    Attributes:
        tensors: Tensors of the version whose live values differ, sorted.
        unchecked: Tensors whose live form is not known, such as quantised ones, sorted.
    """

    tensors: list[str]
    unchecked: list[str]


async def verify(llm: Llm, files: WeightFiles, share: float, deadline_s: float) -> Difference:
    """Compare the live weights of every worker with a version's files.

    With several engines behind one front end (data parallel) only those of the first are known: vLLM gives no other's answer.

    Args:
        llm: vLLM's ``AsyncLLM``, sampling or not.
        files: The version.
        share: Part of the model's tensors to look at, above 0; 1 for all. Which ones depends on the version.
        deadline_s: For all of it.

    Raises:
        EngineError: if a worker cannot compare, or it takes too long.
        HalfLoadedError: if the engine does not answer.
    """
    name, end = "comparing the weights", time.monotonic() + deadline_s
    seed = files.version.epoch * 1_000_003 + files.version.number
    begin = llm.collective_rpc("sluice_verify", kwargs=files.arguments() | {"share": share, "seed": seed})
    answers = await step(llm, name, begin, deadline_s)
    while all(kind in {"ok", "pending"} for kind, _ in answers):
        await asyncio.sleep(BREATH_S)
        look = llm.collective_rpc("sluice_verified", kwargs={"budget_s": PIECE_S})
        answers = await step(llm, name, look, deadline_s)
        if all(kind == "ok" for kind, _ in answers):
            break
        if time.monotonic() > end:
            raise EngineError(f"version {files.version} could not be compared within {deadline_s:.0f} s; take a sample")
    failed = next((str(value) for kind, value in answers if kind != "ok"), "")
    if failed:
        raise EngineError(f"version {files.version} could not be compared with the live weights: {failed}")
    different, unchecked = (sorted({name for _, found in answers for name in found[part]}) for part in (0, 1))
    return Difference(different, unchecked)
