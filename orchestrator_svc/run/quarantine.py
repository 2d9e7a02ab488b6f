"""How tasks come out of quarantine: by an operator while the run lives, or by a setting at a start."""

from __future__ import annotations

import tomllib

import grpc

from orchestrator_svc.run.curriculum import Curriculum
from sluice.rpc import SluiceError
from sluice.v1 import journal_pb2

RELEASE = "quarantine.release"
"""Key of `sluice set` that is no setting: its value is a task, or `ALL`."""

ALL = "all"
"""Value of it that stands for every task in quarantine."""

_MOST_NAMED = 10
"""Tasks in quarantine that a refusal names."""


def chosen(curriculum: Curriculum, text: str) -> list[tuple[str, str]]:
    """Return environment and id of the tasks in quarantine that a value of `RELEASE` means.

    Args:
        curriculum: Knows which tasks are in quarantine.
        text: `ALL`, TASK, or ENVIRONMENT/TASK, as TOML or as it is.

    Raises:
        SluiceError: INVALID_ARGUMENT if no such task is in quarantine.
    """
    there, wanted = curriculum.quarantined, _plain(text)
    if wanted == ALL:
        return there
    found = [(name, task_id) for name, task_id in there if wanted in (task_id, f"{name}/{task_id}")]
    if not found:
        first = ", ".join(f"{name}/{task_id}" for name, task_id in there[:_MOST_NAMED]) or "none"
        problem = f"no task {wanted[:100]!r} is in quarantine; {len(there)} are: {first}. Give one of them, or {ALL}"
        raise SluiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "BAD_SETTING",
            f"nothing was changed: {RELEASE}: {problem}",
            violations={f"values[{RELEASE}]": problem},
        )
    return found


def released(environment: str, task_id: str, principal: str = "") -> journal_pb2.Fact:
    """Return the fact that a task may be drawn again."""
    fact = journal_pb2.TaskReleased(environment=environment, task_id=task_id, principal=principal)
    return journal_pb2.Fact(task_released=fact)


def _plain(text: str) -> str:
    """Return a value of TOML if it is a text, else the words as they are."""
    try:
        value = tomllib.loads(f"value = {text}\n").get("value")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return value if isinstance(value, str) else text
