"""Two processes of an SFT run play an environment with the weights of both, here a sharded adapter, and agree on the best model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_programs import RankPrograms
from safetensors.torch import load_file

from sluice.cli.init_model import ModelShape, init_model

pytestmark = pytest.mark.slow

TIMEOUT_S = 280.0
SHAPE = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=64)

ENVIRONMENT = """
from sluice.environments import Task

class SaysAnythingElse:
    name = "anything else"
    def tasks(self, split, seed):
        return [Task(str(n)) for n in range(3)]
    def messages(self, task):
        return [{"role": "user", "content": "a"}]
    def score(self, task, completion):
        return float(completion != "yes")
"""


def test_two_processes_end_with_the_best_adapter(tmp_path: Path, rank_programs: RankPrograms) -> None:
    init_model(tmp_path / "model", SHAPE, seed=3)
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    message = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": message}) + "\n")
    evaluation = {"environment": f"{tmp_path}/env.py:SaysAnythingElse", "samples": 0, "max_tokens": 6}
    settings = {
        "model": tmp_path / "model",
        "data": tmp_path / "rows.jsonl",
        "output": tmp_path / "out",
        "device": "cpu",
        "threads": 1,
        "lr": 2e-2,
        "batch-size": 4,
        "max-steps": 60,
        "lora.rank": 8,
        "evaluation": json.dumps(evaluation),
        "metric": "greedy_reward_mean",
        "keep-best": "true",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    outputs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    with rank_programs.group(2, "sluice.cli.main", "sft", *words, outputs=outputs) as ranks:
        codes = [rank.wait(TIMEOUT_S) for rank in ranks]
    said = [each.read_text() for each in outputs]
    assert codes == [0, 0], said
    lines = said[0].splitlines()
    assert [line.split("  ")[:2] for line in lines if line.startswith("evaluated")] == [
        ["evaluated after 0 steps:", "greedy_reward_mean 1.0000"],
        ["evaluated after 60 steps:", "greedy_reward_mean 0.0000"],
    ]
    assert lines[-1].endswith("written: greedy_reward_mean 1.0000 after 0 steps")
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert not any(each.any() for name, each in adapter.items() if "lora_B" in name), "the best is not the last"
    left = {each.name for each in tmp_path.iterdir()} - {"__pycache__", *(each.name for each in outputs)}
    assert left == {"env.py", "model", "out", "rows.jsonl"}
