"""Reward functions of a completion and the expected answer: names for settings, plain functions for code."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["REWARDS", "exact_reward", "math_reward"]


def exact_reward(completion: str, answer: str) -> float:
    """1 if the completion is the answer, but for white space around it; else 0."""
    return float(completion.strip() == answer.strip())


def math_reward(completion: str, answer: str) -> float:
    """1 if the last mathematical expression of the completion equals the answer, else 0 (math-verify).

    The library's own time limits rely on signals and are switched off: the worker process has one.
    """
    from math_verify import parse, verify  # noqa: PLC0415 - brings sympy, which is slow to import

    gold = parse(answer, parsing_timeout=None)
    if not gold:
        gold = parse(f"${answer}$", parsing_timeout=None)
    found = parse(completion, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))


REWARDS: Mapping[str, Callable[[str, str], float]] = {"exact": exact_reward, "math": math_reward}
