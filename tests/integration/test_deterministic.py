"""Two deterministic runs with one seed: the same metrics and weights, bit for bit, with episodes of one turn and of several."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from forked_run import ForkedRun
from rank_programs import RankPrograms

from sluice.cli.init_model import ModelShape, init_model
from sluice.cli.report import metrics_digest, read_steps, weight_digests

pytestmark = pytest.mark.slow

DEADLINE_S = 240
STEPS = 3

ENVIRONMENTS = """
import os
import time

from sluice.environments.base import Task, Turn


def pause():
    time.sleep(os.urandom(1)[0] / 25600)  # other times in every run


class Words:
    name = "words"

    def tasks(self, split, seed):
        return [Task(f"{split}-{index}", {"text": "abcdefgh"[: 1 + index % 8]}) for index in range(64)]


class Vowels(Words):
    def messages(self, task):
        pause()
        return [{"role": "user", "content": task.data["text"]}]

    def score(self, task, completion):
        pause()
        return sum(letter in "aeiou" for letter in completion) / max(1, len(completion))


class Talk(Words):
    def reset(self, task, seed):
        return Conversation(task, seed)


class Conversation:
    def __init__(self, task, seed):
        self.messages = [{"role": "user", "content": task.data["text"]}]
        self.turns = 1 + seed % 3

    def step(self, text):
        pause()
        self.turns -= 1
        reward = sum(letter in "aeiou" for letter in text) / max(1, len(text))
        return Turn([{"role": "user", "content": text[:4] or "?"}], reward, self.turns <= 0)
"""

SETTINGS = """
deterministic = true
[orchestrator]
batch_size = 4
group_size = 4
max_steps = {steps}
max_turns = 3
sampling = {{ max_tokens = 12 }}
[[orchestrator.environments]]
name = "vowels"
environment = "{directory}/both.py:Vowels"
[[orchestrator.environments]]
name = "talk"
environment = "{directory}/both.py:Talk"
[trainer]
lr = 1e-2
[rollout]
engine = "transformers"
"""


async def test_two_runs_with_one_seed_are_equal(tmp_path: Path, rank_programs: RankPrograms) -> None:
    """One of `sluice rl`, and one whose services are forks of another process: no two of these processes hash texts alike."""
    (tmp_path / "both.py").write_text(ENVIRONMENTS)
    (tmp_path / "run.toml").write_text(SETTINGS.format(steps=STEPS, directory=tmp_path))
    shape = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=256)
    init_model(tmp_path / "model", shape, seed=0)
    words = ["@", str(tmp_path / "run.toml"), "--seed=3", f"--model={tmp_path}/model", f"--output-dir={tmp_path}/out"]
    command = [sys.executable, "-m", "sluice.cli.main", "rl", *words, "--plain", "--run=one", "--threads=1"]
    ended = await asyncio.to_thread(
        subprocess.run, command, timeout=DEADLINE_S, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert ended.returncode == 0, ended.stdout.decode()[-4000:]
    run = ForkedRun(rank_programs, tmp_path, [*words, "--run=again"])
    try:
        for name in run.addresses:
            await run.start(name)
        async with asyncio.timeout(DEADLINE_S):
            assert await run.processes["orchestrator"].wait() == 0, run.log("orchestrator")
    finally:
        await run.stop()
    (metrics, one), (other_metrics, again) = (told(tmp_path / "out" / name) for name in ("one", "again"))
    assert metrics == other_metrics
    kept = one.keys() & again.keys()  # how long an old version is kept depends on when replicas left it
    assert {"v1.1", "v1.2", f"v1.{STEPS}"} <= kept
    assert {name: one[name] for name in kept} == {name: again[name] for name in kept}
    assert len({one[name] for name in kept}) == len(kept), "each version has other weights"


def told(run_dir: Path) -> tuple[str, dict[str, str]]:
    """Digests of the metrics and of each version of the weights."""
    steps = read_steps(run_dir)
    assert len(steps) == STEPS
    return metrics_digest(steps), weight_digests(run_dir)
