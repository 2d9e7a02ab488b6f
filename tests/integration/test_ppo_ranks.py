"""An update with several models, epochs and minibatches gives the same weights on two processes as on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_programs import RankPrograms

from sluice.cli.init_model import ModelShape, init_model

DEADLINE_S = 280.0
TOLERANCE = 2e-5
"""Largest relative difference in float32: six steps of AdamW add up what one matrix product rounds differently."""

pytestmark = pytest.mark.slow


def test_critics_references_and_selections_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, rank_programs: RankPrograms
) -> None:
    init_model(tmp_path / "model", ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48), seed=3)
    with rank_programs.group(2, "ppo_rank", str(tmp_path / "model"), str(tmp_path / "found.json")) as ranks:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0]
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 5
    for run, differences in found.items():
        assert {name: gap for name, gap in differences.items() if not gap <= TOLERANCE} == {}, run
