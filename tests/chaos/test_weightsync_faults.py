"""Faults at every phase of a version's way: none is ever half-visible, lost after its commit, or wrong by a bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from weight_faults.cells import CELLS, Cell
from weight_faults.damage import DAMAGES, Damage
from weight_faults.matrix import run_cell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_every_version_is_whole_kept_and_right_after_a_kill(cell: Cell, tmp_path: Path) -> None:
    result = run_cell(cell, tmp_path / "cell")
    assert result.ok, result.detail


@pytest.mark.parametrize("cell", DAMAGES, ids=lambda cell: cell.id)
def test_no_room_damage_and_standstill_leave_the_old_version_and_let_the_next_through(
    cell: Damage, tmp_path: Path
) -> None:
    result = run_cell(cell, tmp_path / "cell")
    assert result.ok, result.detail
