"""What runs inside a scoring process: the environment, constructed once, and its `score`."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator_svc.envs.base import SingleTurnEnvironment, Task
from orchestrator_svc.envs.loading import load_environment

__all__ = ["initialise", "score"]

_environment: SingleTurnEnvironment | None = None


def initialise(reference: str, arguments: Mapping[str, Any]) -> None:
    """Construct the environment; Ctrl-C is left to the parent."""
    global _environment  # noqa: PLW0603 - a worker process is this object's lifetime
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment = load_environment(reference, arguments)
    if not isinstance(environment, SingleTurnEnvironment):
        raise TypeError(f"environment {reference} has no score(task, completion)")
    _environment = environment


def score(task_id: str, data: Mapping[str, Any], completions: Sequence[str]) -> list[float]:
    """Rewards of some completions of one task.

    Raises:
        ValueError: if one is not finite.
    """
    if _environment is None:
        raise RuntimeError("the scoring process was not initialised")
    task = Task(task_id, data)
    rewards = [float(_environment.score(task, completion)) for completion in completions]
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"score of task {task_id} is not finite: {rewards}")
    return rewards
