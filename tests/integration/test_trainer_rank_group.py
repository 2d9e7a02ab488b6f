"""Rank 0 and the others, without a model: who gets which rows, how long they may wait, what a failure does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from group_rank import SHORT_S
from rank_programs import RankPrograms

DEADLINE_S = 280.0

pytestmark = pytest.mark.slow


def test_ranks_share_rows_wait_beyond_a_timeout_and_fail_together(tmp_path: Path, rank_programs: RankPrograms) -> None:
    with rank_programs.group(2, "group_rank", str(tmp_path)) as ranks:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0]
    leader, follower = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (leader["data"], follower["data"]) == (["a"], ["b", "c"]), "each data-parallel rank has rows of its own"
    assert leader["tensor"] == follower["tensor"] == ["a", "b", "c"], "ranks of one share have the same rows"
    assert (leader["after a pause"], follower["after a pause"]) == (["a"], [])
    assert (leader["save"], follower["save"]) == ("FileNotFoundError", True), "a failure of all leaves them together"
    assert leader["failed"].startswith(
        "UNAVAILABLE RANK_LOST a rank of the trainer failed (rank 1: ValueError: no such"
    )
    assert leader["told"] == 1
    assert f"ranks [1] did not answer within {SHORT_S:g} s" in leader["silent"]
    assert "rank 0 is gone" in follower["left alone"]
