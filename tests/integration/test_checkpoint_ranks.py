"""A checkpoint of one process goes on in two, and back; a rank that fails or dies costs the checkpoint, not those before."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from checkpoint_rank import CONFIG, step
from rank_programs import RankPrograms
from safetensors.torch import load_file

from sluice.cli.init_model import ModelShape, init_model
from trainer_svc.checkpoint.saver import EngineCheckpoints
from trainer_svc.checkpoint.state import stored_tensors
from trainer_svc.engine.engine import TrainEngine

DEADLINE_S = 280.0
TOLERANCE = 1e-7
"""Largest difference of weights and moments between a step on whole matrices and one on their parts."""

pytestmark = pytest.mark.slow


UP_PROJ = {
    "tied/dp_shard": [[24, 32]],
    "tied/dp_replicate": [[47, 32]],
    "tied/cp": [[24, 32]],
    "tied/pp": [[47, 32]],
    "untied/tp": [[24, 32]],
    "untied/pp": [[48, 32]],
}
"""What rank 0 holds of a matrix of 47 or 48 rows, by model and by the axis that has two processes."""


def test_one_two_and_one_rank_share_checkpoints_and_a_death_costs_none_of_them(
    tmp_path: Path, rank_programs: RankPrograms
) -> None:
    straight = {"tied": one_process(tmp_path / "tied", mlp=47, tie=True)}
    straight["untied"] = one_process(tmp_path / "untied", mlp=48, tie=False)
    with rank_programs.group(2, "checkpoint_rank", str(tmp_path), *UP_PROJ) as ranks:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, -signal.SIGKILL]
    seen = json.loads((tmp_path / "0.json").read_text())
    assert seen.pop("full") == "OSError: rank 1 raised OSError: No space left on device"
    first, second = seen.pop("late")
    assert first.startswith("OSError: rank 1 raised TimeoutError: the checkpoint before is still being written"), first
    assert second == "", "the ranks are still in step"
    shutil.rmtree(tmp_path / "late")
    assert seen.pop("killed"), "the death of a rank is told within the deadline"
    assert seen.pop("offload"), "moments in host memory are those of AdamW, to the bit"
    assert seen == {each: {"same": True, "up_proj": held} for each, held in UP_PROJ.items()}
    assert {path.name for path in tmp_path.iterdir()} == {"0.json", *straight}
    for each in UP_PROJ:
        goes_on(straight[each.split("/")[0]], tmp_path / each)


def one_process(directory: Path, **shape: int) -> TrainEngine:
    """Two steps of one process and their checkpoint, then the step that the others repeat."""
    init_model(directory / "model", ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, **shape), seed=3)
    engine = TrainEngine(CONFIG, directory / "model")
    step(engine)
    step(engine)
    EngineCheckpoints(engine).save(str(directory / "one"))
    step(engine)
    return engine


def goes_on(straight: TrainEngine, directory: Path) -> None:
    """One process goes on from what two wrote as if it had made their step."""
    state = directory / "state"
    assert len(list(state.iterdir())) == 2, "each rank wrote its share"
    assert {"random.cpu.0", "random.cpu.1"} <= stored_tensors(state).keys()
    resumed = TrainEngine(CONFIG, directory.parent / "model")
    EngineCheckpoints(resumed).load(directory)
    expected, found = straight.state_tensors(), resumed.state_tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE, msg=f"{directory.name} {name}")
    assert resumed.optimizer_steps == 3
    exported = load_file(directory / "hf" / "model.safetensors")
    named = resumed.named_tensors()
    assert exported.keys() == named.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in named.items())
    described = json.loads((directory / "hf" / "config.json").read_text())
    original = json.loads((directory.parent / "model" / "config.json").read_text())
    for key in ("architectures", "num_hidden_layers", "tie_word_embeddings"):
        assert described[key] == original[key]
