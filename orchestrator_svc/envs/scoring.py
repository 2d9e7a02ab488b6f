"""Score completions in worker processes. A reward that fails or is late is missing, never 0, and its process is killed."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any, Self

import structlog
from pebble import ProcessExpired, ProcessPool

from orchestrator_svc.envs.base import SingleTurnEnvironment, Task
from orchestrator_svc.envs.loading import load_environment

log = structlog.get_logger(__name__)

_STOP_S = 3.0
"""Seconds that workers get to end before they are killed."""

_TASKS_PER_WORKER = 1 << 16
"""Scorings after which a worker is replaced: a reward function that leaks must not fill the memory."""

_environment: SingleTurnEnvironment | None = None
"""In a worker process: the environment, constructed once."""


class Scorer:
    """A pool of scoring processes; use it as an async context.

    Args:
        environment: Reference of the environment whose `score` is called.
        time_limit_s: Seconds for one call of a worker, which is killed when they are over.

    Attributes:
        failures: Failed scorings by kind: "timeout", "crash", "error"; "missing" counts the rewards that were given up.
    """

    def __init__(
        self, environment: str, arguments: Mapping[str, Any], *, workers: int, time_limit_s: float, retries: int
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._time_limit_s, self._retries = time_limit_s, retries
        # A server process forks workers that have no gRPC threads; replacing a killed one is then quick.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pool = ProcessPool(
            max_workers=workers,
            max_tasks=_TASKS_PER_WORKER,
            initializer=_initialise_worker,
            initargs=[environment, dict(arguments)],
            context=context,
        )

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Stop the workers; what is still being scored is given up."""
        self._pool.stop()
        await asyncio.to_thread(self._pool.join, _STOP_S)

    async def score(self, task: Task, completions: Sequence[str]) -> list[float | None]:
        """Return the rewards of some completions of a task; None where a reward is missing.

        All are scored in one call. If that fails, each is scored on its own, so that one bad completion spoils no other.
        """
        together = await self._attempt(task, completions)
        if together is not None:
            return list(together)
        return [await self._alone(task, each) for each in completions]

    async def _alone(self, task: Task, completion: str) -> float | None:
        for _ in range(self._retries):
            reward = await self._attempt(task, [completion])
            if reward is not None:
                return reward[0]
        self.failures["missing"] += 1
        log.info("reward is missing", task=task.task_id)
        return None

    async def _attempt(self, task: Task, completions: Sequence[str]) -> list[float] | None:
        future = self._pool.schedule(
            _score_in_worker,
            args=[replace(task, data=dict(task.data)), list(completions)],  # any mapping, but a dict can be sent
            timeout=self._time_limit_s,
        )
        try:
            rewards: list[float] = await asyncio.wrap_future(future)
        except TimeoutError:
            self.failures["timeout"] += 1
            log.warning("scoring was late", task=task.task_id, limit_s=self._time_limit_s)
        except ProcessExpired as error:
            self.failures["crash"] += 1
            log.warning("scoring process ended", task=task.task_id, exit_code=error.exitcode)
        except (asyncio.CancelledError, CancelledError):
            future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything; the reward is then missing
            self.failures["error"] += 1
            log.warning("scoring failed", task=task.task_id, error=repr(error))
        else:
            return rewards
        return None


def _initialise_worker(reference: str, arguments: Mapping[str, Any]) -> None:
    """Construct the environment in a worker process; leave Ctrl-C to the parent."""
    global _environment  # noqa: PLW0603 - a worker process is this object's lifetime
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment = load_environment(reference, arguments)
    if not isinstance(environment, SingleTurnEnvironment):
        raise TypeError(f"environment {reference} has no score(task, completion)")
    _environment = environment


def _score_in_worker(task: Task, completions: Sequence[str]) -> list[float]:
    """Return the rewards of some completions of one task.

    Raises:
        ValueError: if one is not finite.
    """
    if _environment is None:
        raise RuntimeError("the scoring process was not initialised")
    rewards = [float(_environment.score(task, completion)) for completion in completions]
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"score of task {task.task_id} is not finite: {rewards}")
    return rewards
