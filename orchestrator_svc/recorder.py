"""What a run leaves for people: metrics.jsonl and TensorBoard, every trajectory, and report.json. One thread writes it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orchestrator_svc.staleness import Lineage
from orchestrator_svc.step_summary import token_ages
from sluice.host_files import write_whole
from sluice.telemetry import MetricsWriter
from sluice.v1 import orchestrator_pb2, tokens_pb2
from sluice.versions import Version, sampled_tokens

__all__ = ["Recorder", "build_report", "read_metrics", "trajectory_row"]

_WAITING = 16
"""Writes that may wait; then the run waits for the disk."""

_STALENESS_PREFIX = "staleness/tokens_at_"


class Recorder:
    """Writes files while the run continues.

    Args:
        run_dir: The run's directory.
        write_text: Also write the trajectories.
    """

    def __init__(self, run_dir: Path, *, write_text: bool) -> None:
        self._run_dir, self._write_text = run_dir, write_text
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._writer: MetricsWriter | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        records: Sequence[orchestrator_pb2.TrajectoryRecord],
        lineage: Lineage,
    ) -> None:
        """Record one applied batch; return before it is written, unless the disk is far behind.

        Raises:
            OSError: if an earlier write failed.
        """

        def write() -> None:
            self._metrics().write(step, metrics)
            if self._write_text:
                rows = [trajectory_row(record, lineage) for record in records]
                _write_rows(self._run_dir / "trajectories" / f"step_{step:06d}.jsonl", rows)

        await self._soon(write)

    async def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record scalars of an evaluation."""
        await self._soon(lambda: self._metrics().write(step, metrics))

    async def report(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``report.json`` from all steps recorded so far and some facts of the run; return it."""

        def write() -> dict[str, Any]:
            self._metrics().flush()
            report = build_report(read_metrics(self._run_dir / "metrics.jsonl"), facts)
            write_whole(self._run_dir / "report.json", json.dumps(report, indent=2) + "\n")
            return report

        await self._drain(0)
        return await asyncio.get_running_loop().run_in_executor(self._thread, write)

    async def close(self) -> None:
        """Write what waits and close the files."""
        try:
            await self._drain(0)
        finally:
            if self._writer is not None:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.close)
            self._thread.shutdown()

    def _metrics(self) -> MetricsWriter:
        if self._writer is None:
            self._writer = MetricsWriter(self._run_dir)
        return self._writer

    async def _soon(self, write: Callable[[], None]) -> None:
        self._waiting.append(asyncio.get_running_loop().run_in_executor(self._thread, write))
        await self._drain(_WAITING)

    async def _drain(self, left: int) -> None:
        while len(self._waiting) > left or (self._waiting and self._waiting[0].done()):
            await self._waiting.popleft()


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return metrics by step; for a step that was trained again after a rollback, those of the last time."""
    steps: dict[int, dict[str, float]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the torn last line of a process that was killed
            step = int(row.pop("step"))
            values = {name: value for name, value in row.items() if value is not None}
            if "reward/mean" in values:
                steps[step] = {**_evaluations(steps.get(step, {})), **values}
            else:
                steps.setdefault(step, {}).update(values)
    return steps


def build_report(steps: Mapping[int, Mapping[str, float]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of a run, folded from its metrics, so that it also covers earlier processes of the run.

    Args:
        steps: Metrics by step.
        facts: What the metrics do not hold: run, seed, state, steps, wall_s, counts of trajectories.
    """
    trained = {step: values for step, values in sorted(steps.items()) if 0 < step <= int(facts["steps"])}
    ages: dict[int, float] = {}
    for values in trained.values():
        for name, tokens in values.items():
            if name.startswith(_STALENESS_PREFIX):
                age = int(name.removeprefix(_STALENESS_PREFIX))
                ages[age] = ages.get(age, 0.0) + tokens
    tokens = sum(ages.values())
    return {
        **facts,
        "tokens_trained": round(_sum(trained, "tokens/trained")),
        "max_staleness_seen": max((age for age, count in ages.items() if count), default=0),
        "staleness_share_ge_1": sum(count for age, count in ages.items() if age >= 1) / tokens if tokens else 0.0,
        "staleness_tokens": {str(age): round(count) for age, count in sorted(ages.items())},
        "mismatch_kl_mean": _mean(trained, "trainer/mismatch_kl"),
        "step_s_mean": _mean(trained, "time/step_s"),
        "trainer_idle_share": _mean(trained, "load/trainer_idle"),
        "rollout_idle_share": _mean(trained, "load/rollout_idle"),
        "dispatch_blocked_share": _mean(trained, "load/dispatch_blocked"),
        "reward_curve": [[step, values["reward/mean"]] for step, values in trained.items() if "reward/mean" in values],
        "evaluations": [
            {"step": step, **_evaluations(values)} for step, values in sorted(steps.items()) if _evaluations(values)
        ],
    }


def _evaluations(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith("eval/")}


def _sum(steps: Mapping[int, Mapping[str, float]], name: str) -> float:
    return sum(values.get(name, 0.0) for values in steps.values())


def _mean(steps: Mapping[int, Mapping[str, float]], name: str) -> float | None:
    found = [values[name] for values in steps.values() if name in values]
    return sum(found) / len(found) if found else None


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows of one step; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def trajectory_row(record: orchestrator_pb2.TrajectoryRecord, lineage: Lineage) -> dict[str, Any]:
    """Return a trajectory for people: text, reward, advantage, the versions that sampled it, its outcome."""
    trajectory = record.trajectory
    messages = record.conversation.messages
    ages = [age for age, _ in token_ages(trajectory, lineage, record.step - 1)] if record.step else []
    return {
        "step": record.step,
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "task_id": trajectory.task_id,
        "prompt": [_message(each) for each in messages[:-1]],
        "completion": messages[-1].content if messages else "",
        "reward": trajectory.reward if trajectory.HasField("reward") else None,
        "advantage": trajectory.advantages[0] if len(trajectory.advantages) == 1 else list(trajectory.advantages),
        "prompt_tokens": trajectory.mask_runs[0] if trajectory.mask_runs else 0,
        "tokens": sampled_tokens(trajectory),
        "finish_reason": tokens_pb2.FinishReason.Name(trajectory.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "versions": [[span.start, str(Version.from_proto(span.policy_version))] for span in trajectory.version_spans],
        "staleness": max(ages, default=None),
        "outcome": "trained" if record.outcome == tokens_pb2.TRAJECTORY_OUTCOME_TRAINED else "dropped",
        "reason": record.reason,
    }


def _message(message: tokens_pb2.ChatMessage) -> dict[str, Any]:
    """Return role and content, and the other fields that are set."""
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    rest = {
        "name": message.name,
        "reasoning": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
    }
    return {"role": message.role, "content": message.content, **{key: value for key, value in rest.items() if value}}
