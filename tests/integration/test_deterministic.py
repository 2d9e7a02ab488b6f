"""Two deterministic runs with one seed: the same metrics and weights, bit for bit, with episodes of one turn and of several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


def test_two_runs_with_one_seed_are_equal(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(ENVIRONMENTS)
    (tmp_path / "run.toml").write_text(SETTINGS.format(steps=STEPS, directory=tmp_path))
    shape = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=256)
    init_model(tmp_path / "model", shape, seed=0)
    found = []
    for name in ("one", "again"):
        command = [sys.executable, "-m", "sluice.cli.main", "rl", "@", "run.toml", "--plain", f"--run={name}"]
        command += ["--seed=3", "--model=model", "--output-dir=out"]
        ended = subprocess.run(
            command, cwd=tmp_path, timeout=DEADLINE_S, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert ended.returncode == 0, ended.stdout.decode()[-4000:]
        steps = read_steps(tmp_path / "out" / name)
        assert len(steps) == STEPS
        found.append((metrics_digest(steps), weight_digests(tmp_path / "out" / name)))
    (metrics, one), (other_metrics, again) = found
    assert metrics == other_metrics
    kept = one.keys() & again.keys()  # how long an old version is kept depends on when replicas left it
    assert {"v1.1", "v1.2", f"v1.{STEPS}"} <= kept
    assert {name: one[name] for name in kept} == {name: again[name] for name in kept}
    assert len({one[name] for name in kept}) == len(kept), "each version has other weights"
