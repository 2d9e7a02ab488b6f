"""Whoever starts processes takes them along, also when it is killed without a chance to say so."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from supervised import ending, eventually

from sluice.cli.init_model import ModelShape, init_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENVIRONMENT = """
from sluice.environments.base import Task

class Echo:
    name = "echo"

    def tasks(self, split, seed):
        return [Task(str(index), {}) for index in range(64)]

    def messages(self, task):
        return [{"role": "user", "content": "abc"}]

    def score(self, task, completion):
        return 0.0
"""

BUSY_ENVIRONMENT = """
import subprocess, sys

class Busy:
    name = "busy"

    def __init__(self, mark):
        self.mark = mark

    def tasks(self, split, seed):
        for _ in range(2):
            subprocess.Popen([sys.executable, "-c", "while True: pass", self.mark])
        while True:
            pass

    def messages(self, task): ...
    def score(self, task, completion): ...
"""


def processes_with(word: str) -> dict[int, str]:
    """Commands of the processes that have a word in their command line, by id."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode() if entry.name.isdigit() else ""
            if word in command:
                found[int(entry.name)] = command
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_an_evaluation_that_is_killed_takes_its_replica_along(tmp_path: Path, number: signal.Signals):
    model = tmp_path / "model"
    init_model(
        model, ModelShape(hidden=32, layers=1, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=64), seed=0
    )
    (tmp_path / "echo_env.py").write_text(ENVIRONMENT)
    evaluation = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.cli.main", "eval", "--model", str(model), "--engine", "transformers"),
        *("--environment", f"{tmp_path / 'echo_env.py'}:Echo"),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await eventually(lambda: any(" rollout " in command for command in processes_with(str(model)).values()))
        evaluation.send_signal(number)
        await ending(evaluation.wait())
        await eventually(lambda: not processes_with(str(model)))
    finally:
        for pid in processes_with(str(model)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await evaluation.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_what_an_environment_started_ends_with_the_orchestrator(tmp_path: Path, number: signal.Signals):
    mark = str(tmp_path)
    (tmp_path / "busy_env.py").write_text(BUSY_ENVIRONMENT)
    evaluation = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.cli.main", "eval", "--address", "127.0.0.1:1"),
        *("--environment", f"{tmp_path / 'busy_env.py'}:Busy", "--environment-args.mark", mark),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await eventually(lambda: len(processes_with(mark)) > 3)  # the evaluation, the environment and its two children
        evaluation.send_signal(number)
        await ending(evaluation.wait())
        await eventually(lambda: not processes_with(mark))
    finally:
        for pid in processes_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await evaluation.wait()
