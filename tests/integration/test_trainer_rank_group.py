"""Rank 0 and the others, without a model: who gets which rows, how long they may wait, what a failure does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_programs import RankPrograms

from benchmarks.children import free_port

DEADLINE_S = 120.0

pytestmark = pytest.mark.slow


def test_ranks_share_rows_wait_beyond_a_timeout_and_fail_together(tmp_path: Path, rank_programs: RankPrograms) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        rank_programs.start("group_rank", str(tmp_path), environment=place | {"RANK": str(rank)}) for rank in range(2)
    ]
    try:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    leader, follower = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (leader["data"], follower["data"]) == (["a"], ["b", "c"]), "each data-parallel rank has rows of its own"
    assert leader["tensor"] == follower["tensor"] == ["a", "b", "c"], "ranks of one share have the same rows"
    assert (leader["after a pause"], follower["after a pause"]) == (["a"], [])
    assert (leader["save"], follower["save"]) == ("FileNotFoundError", "save"), "a failure of all leaves them together"
    assert leader["failed"].startswith(
        "UNAVAILABLE RANK_LOST a rank of the trainer failed (rank 1: ValueError: no such"
    )
    assert leader["told"] == 1
    assert "ranks [1] did not answer within 3 s" in leader["silent"]
    assert "rank 0 is gone" in follower["left alone"]
