"""A checkpoint of one process goes on in two, and back; a rank that fails or dies costs the checkpoint, not those before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_rank import CONFIG, step
from safetensors.torch import load_file
from trainer_programs import free_port

from sluice.cli.init_model import ModelShape, init_model
from trainer_svc.checkpoint.shards import stored_tensors
from trainer_svc.engine.engine import TrainEngine

PROGRAM = Path(__file__).parents[1] / "checkpoint_rank.py"
DEADLINE_S = 120.0
TOLERANCE = 1e-7
"""Largest difference of weights and moments between a step on whole matrices and one on their parts."""

pytestmark = pytest.mark.slow


def test_one_two_and_one_rank_share_checkpoints_and_a_death_costs_none_of_them(tmp_path: Path) -> None:
    model = tmp_path / "model"
    init_model(model, ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=47), seed=3)
    straight = TrainEngine(CONFIG, model)
    step(straight)
    step(straight)
    straight.save(tmp_path / "one")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(tmp_path), str(model)]
    ranks = [subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, -signal.SIGKILL]
    finally:
        for rank in ranks:
            rank.kill()
    seen = json.loads((tmp_path / "0.json").read_text())
    assert seen["same"], "each rank holds its part of what one process wrote"
    assert seen["uneven"] == [[24, 32]], "of 47 rows"
    assert seen["two"] == ""
    assert seen["three"] == "PartFailedError: rank 1 failed: OSError: No space left on device"
    assert seen["four"], "the death of a rank is told within the deadline"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "model", "one", "two"]

    step(straight)
    state = tmp_path / "two" / "state"
    assert len(list(state.iterdir())) == 2, "each rank wrote its share"
    assert {"random.cpu.0", "random.cpu.1"} <= stored_tensors(state).keys()
    resumed = TrainEngine(CONFIG, model)
    resumed.load(tmp_path / "two")
    expected, found = straight.state_tensors(), resumed.state_tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE)
    assert resumed.optimizer_steps == 3
    exported = load_file(tmp_path / "two" / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in resumed.named_tensors().items())
    described = json.loads((tmp_path / "two" / "hf" / "config.json").read_text())
    assert described["architectures"] == ["Qwen3ForCausalLM"]
