"""The state of a run, built from its events. Pure: no clock and no terminal, so that every view of it can be tested."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice.v1 import orchestrator_pb2

__all__ = ["METRIC_NAMES", "RunProgress", "sparkline", "step_line"]

METRIC_NAMES: Mapping[str, str] = {
    "reward": "reward/mean",
    "staleness": "staleness/mean",
    "loss": "trainer/loss",
    "entropy": "trainer/entropy",
    "mismatch_kl": "trainer/mismatch_kl",
}
"""The metrics that views show, by their short names."""

_HISTORY = 400
"""Rewards that are kept for the sparkline."""

_PACE_STEPS = 20
"""Steps over which the seconds per step are averaged."""

_BLOCKS = "▁▂▃▄▅▆▇█"

_STATES = {
    orchestrator_pb2.RUN_STATE_STARTING: "starting",
    orchestrator_pb2.RUN_STATE_RUNNING: "running",
    orchestrator_pb2.RUN_STATE_PAUSED: "paused",
    orchestrator_pb2.RUN_STATE_STOPPING: "finishing",
    orchestrator_pb2.RUN_STATE_SUCCEEDED: "succeeded",
    orchestrator_pb2.RUN_STATE_FAILED: "failed",
}

_WAITS = {
    "rollout": "trainer waits for rollout",
    "trainer": "rollout waits for trainer",
}


@dataclass
class RunProgress:
    """What is known about a run.

    Attributes:
        max_steps: Batches to apply in all; 0 until it is known.
        max_staleness: Bound on the staleness of trained tokens.
        step: Last step that was reported.
        applied: Batches applied, including those before a resume.
        state: The state in one word.
        message: The reason of the state.
        metrics: Metrics of the last step.
        rewards: Mean reward of each step, the last few hundred.
        load: The last report of the load.
        replicas: Replicas by address, which is known before the name.
        evaluations: Finished evaluations.
    """

    max_steps: int = 0
    max_staleness: int = 0
    step: int = 0
    applied: int = 0
    state: str = "starting"
    message: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    load: orchestrator_pb2.LoadReport = field(default_factory=orchestrator_pb2.LoadReport)
    replicas: dict[str, orchestrator_pb2.Replica] = field(default_factory=dict)
    evaluations: list[orchestrator_pb2.EvaluationFinished] = field(default_factory=list)
    _times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))

    def describe(self, run: orchestrator_pb2.Run) -> None:
        """Take over what GetRun answers."""
        self.max_steps, self.max_staleness = run.max_steps, run.max_staleness
        self.applied = max(self.applied, run.step)
        self.state = _STATES.get(run.state, self.state)
        self.replicas = {each.address: each for each in run.replicas}

    def apply(self, event: orchestrator_pb2.RunEvent) -> bool:
        """Take over an event.

        Returns:
            Whether it is a new step. A server that restarts repeats its events.
        """
        match event.WhichOneof("kind"):
            case "state_changed":
                self.state = _STATES.get(event.state_changed.state, self.state)
                self.message = event.state_changed.message
            case "step_finished":
                return self._finish_step(event)
            case "evaluation_finished":
                if event.evaluation_finished not in self.evaluations:
                    self.evaluations.append(event.evaluation_finished)
            case "replica_changed":
                self.replicas[event.replica_changed.replica.address] = event.replica_changed.replica
            case "load":
                self.load = event.load
            case _:
                pass
        return False

    def _finish_step(self, event: orchestrator_pb2.RunEvent) -> bool:
        finished = event.step_finished
        if finished.step <= self.step:
            return False
        self.step = self.applied = finished.step
        self.metrics = dict(finished.metrics)
        self._times.append((finished.step, event.time.seconds + event.time.nanos / 1e9))
        reward = self.metric("reward")
        if reward is not None:
            self.rewards.append(reward)
        return True

    @property
    def succeeded(self) -> bool:
        """Whether the run has done its last step. A failed one may continue: its orchestrator is started again."""
        return self.state == _STATES[orchestrator_pb2.RUN_STATE_SUCCEEDED]

    def metric(self, name: str) -> float | None:
        """Return a metric of the last step by its short name; None if it is missing."""
        return self.metrics.get(METRIC_NAMES.get(name, name))

    def seconds_per_step(self) -> float | None:
        """Return the mean seconds of the last steps; None before the second one."""
        if len(self._times) < 2:
            return None
        (first_step, first), (last_step, last) = self._times[0], self._times[-1]
        return (last - first) / (last_step - first_step)

    def remaining_s(self) -> float | None:
        """Return the estimated seconds to the last step; None if unknown."""
        pace = self.seconds_per_step()
        return None if pace is None or not self.max_steps else pace * max(0, self.max_steps - self.step)

    def waiting(self) -> str:
        """Return which side waits for the other, for people."""
        return _WAITS.get(self.load.bottleneck, "balanced")


def sparkline(values: list[float], width: int) -> str:
    """Return values as a row of at most `width` blocks, each the mean of equally many values, scaled to their range."""
    if not values or width < 1:
        return ""
    size = -(-len(values) // width)
    buckets = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(bucket) / len(bucket) for bucket in buckets]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)


def step_line(progress: RunProgress) -> str:
    """Return one line about the last step, for output that is not a terminal."""
    parts = [f"step {progress.step}/{progress.max_steps or '?'}"]
    for name, digits in (("reward", 3), ("staleness", 2), ("mismatch_kl", 5), ("entropy", 3)):
        value = progress.metric(name)
        if value is not None:
            parts.append(f"{name} {value:.{digits}f}")
    pace = progress.seconds_per_step()
    if pace is not None:
        parts.append(f"{pace:.2f} s/step")
    if progress.load.generated_tokens_per_s:
        parts.append(f"{progress.load.generated_tokens_per_s:,.0f} tokens/s")
        parts.append(progress.waiting())
    remaining = progress.remaining_s()
    if remaining is not None:
        parts.append(f"{remaining:.0f} s left")
    return "  ".join(parts)
