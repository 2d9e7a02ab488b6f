"""When an engine's process may be forked."""

from __future__ import annotations

import json
import subprocess
import sys

import fork_checks
import pytest


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """Run the checks in a separate process and return their results."""
    done = subprocess.run(
        [sys.executable, fork_checks.__file__], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("part", fork_checks.PARTS)
def test_no_fork_while_something_of_grpc_lives(found: dict[str, str], part: str) -> None:
    assert not found[part], found[part]


def test_the_garbage_of_grpc_is_not_inherited(found: dict[str, str]) -> None:
    failed = found["garbage_of_grpc_is_not_inherited"]
    assert not failed, failed


def test_a_forked_child_leaves_its_parents_garbage_alone(found: dict[str, str]) -> None:
    failed = found["child_leaves_its_parents_garbage_alone"]
    assert not failed, failed
