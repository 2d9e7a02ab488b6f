"""One of two ranks runs out of memory while the other waits for it in a collective: the batch is trained after a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rank_programs import RankPrograms
from safetensors.torch import load_file

from sluice.cli.init_model import ModelShape, init_model

DEADLINE_S = 280.0
TOLERANCE = 1e-5
"""Of a weight or a loss, in float32: what another packing changes in sixteen steps of AdamW."""

pytestmark = pytest.mark.slow


def start(programs: RankPrograms, directory: Path, epoch: int, place: str) -> tuple[list[int], dict]:
    """Start both ranks and wait for their end. Return their exit codes and the notes of rank 0."""
    with programs.group(2, "memory_rank", str(directory), str(epoch), place) as ranks:
        codes = [rank.wait(DEADLINE_S) for rank in ranks]
    return codes, json.loads((directory / f"notes.{epoch}.json").read_text())


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "outputs/test/checkpoints/step_4/hf/model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, rank_programs: RankPrograms) -> tuple[Path, dict]:
    directory = tmp_path_factory.mktemp("undisturbed")
    shape = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=512)
    init_model(directory / "model", shape, seed=3)
    codes, notes = start(rank_programs, directory, 1, "nowhere")
    assert codes == [0, 0]
    return directory, notes


@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
def test_the_batch_is_trained_with_half_the_budget_after_a_restart(
    tmp_path: Path, rank_programs: RankPrograms, undisturbed: tuple[Path, dict], place: str
) -> None:
    reference, expected = undisturbed
    (tmp_path / "model").symlink_to(reference / "model")
    codes, first = start(rank_programs, tmp_path, 1, place)
    assert codes == [1, 1]
    assert first["failed"].startswith("RANK_LOST a rank of the trainer failed (rank 1: MemoryShortError")
    noted = tmp_path / "outputs/test/trainer/out_of_memory.1.binpb"
    assert noted.exists()

    codes, second = start(rank_programs, tmp_path, 2, "nowhere")
    assert codes == [0, 0]
    assert second["begun"] == 1
    assert (second["halved"], expected["halved"]) == ([2], [])
    assert second["steps"] == expected["steps"] == 16
    assert first["losses"] | second["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
    assert not noted.exists()
    found, whole = weights(tmp_path), weights(reference)
    assert max(float((found[name] - whole[name]).abs().max()) for name in whole) < TOLERANCE
