"""Two processes of an SFT run play an environment with the weights of both, here a sharded adapter, and agree on the best model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.cli.init_model import ModelShape, init_model

pytestmark = pytest.mark.slow

TIMEOUT_S = 280.0
SHAPE = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=64)

ENVIRONMENT = """
from sluice.environments import Task

class Says:
    name = "says"
    def tasks(self, split, seed):
        return [Task(str(n)) for n in range(3)]
    def messages(self, task):
        return [{"role": "user", "content": "a"}]
    def score(self, task, completion):
        return float(completion == "yes")
"""


def test_two_processes_end_with_the_best_adapter(tmp_path: Path) -> None:
    init_model(tmp_path / "model", SHAPE, seed=3)
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    message = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": message}) + "\n")
    evaluation = {"environment": f"{tmp_path}/env.py:Says", "samples": 0, "max_tokens": 6}
    settings = {
        "model": tmp_path / "model",
        "data": tmp_path / "rows.jsonl",
        "output": tmp_path / "out",
        "device": "cpu",
        "threads": 1,
        "lr": 2e-2,
        "batch-size": 4,
        "max-steps": 120,
        "eval-every": 60,
        "lora.rank": 8,
        "evaluation": json.dumps(evaluation),
        "metric": "greedy_reward_mean",
        "keep-best": "true",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "-m", "sluice.cli.main", "sft", *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    evaluated = [line.split("  ")[:2] for line in ended.stdout.splitlines() if line.startswith("evaluated")]
    assert evaluated == [
        ["evaluated after 0 steps:", "greedy_reward_mean 0.0000"],
        ["evaluated after 60 steps:", "greedy_reward_mean 1.0000"],
        ["evaluated after 120 steps:", "greedy_reward_mean 1.0000"],
    ]
    assert ended.stdout.splitlines()[-1].endswith("written: greedy_reward_mean 1.0000 after 60 steps")
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    left = {each.name for each in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"env.py", "model", "out", "rows.jsonl"}
