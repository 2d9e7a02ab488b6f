"""Every trajectory as a line of JSON for people: ``trajectories/step_*.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator_svc.staleness import Lineage
from orchestrator_svc.step_summary import sampled_tokens, token_ages
from sluice.v1 import orchestrator_pb2, tokens_pb2
from sluice.versions import Version

__all__ = ["trajectory_row", "write_trajectories"]


def write_trajectories(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write one step's rows; the file appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}")
    with staging.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    staging.replace(path)


def trajectory_row(record: orchestrator_pb2.TrajectoryRecord, lineage: Lineage) -> dict[str, Any]:
    """A trajectory for reading: text, reward, advantage, who sampled which tokens, what became of it."""
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
    """Role and content, and what else the message has."""
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    rest = {
        "name": message.name,
        "reasoning": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
    }
    return {"role": message.role, "content": message.content, **{key: value for key, value in rest.items() if value}}
