"""Faults at every phase of a version's way: none is ever half-visible, lost after its commit, or wrong by a bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from weight_faults.cells import CELLS, PROVED, Cell
from weight_faults.damage import DAMAGES, Damage
from weight_faults.matrix import run_cell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


MATRIX = [pytest.param(each, id=each.id, marks=[] if each.id in PROVED else [pytest.mark.soak]) for each in CELLS]


def test_the_cells_of_every_run_have_each_point_once_and_each_victim_way_and_form() -> None:
    proved = [each for each in CELLS if each.id in PROVED]
    assert len(proved) == len(PROVED), "each id is that of a cell"
    points = [(each.point.target, each.point.when, each.point.match) for each in proved]
    assert sorted(points) == sorted({(each.point.target, each.point.when, each.point.match) for each in CELLS})
    for kind in (lambda cell: cell.victim, lambda cell: (cell.relay, cell.local_files), lambda cell: cell.form):
        assert set(map(kind, proved)) == set(map(kind, CELLS))


@pytest.mark.parametrize("cell", MATRIX)
def test_every_version_is_whole_kept_and_right_after_a_kill(cell: Cell, tmp_path: Path) -> None:
    result = run_cell(cell, tmp_path / "cell")
    assert result.ok, result.detail


@pytest.mark.parametrize("cell", DAMAGES, ids=lambda cell: cell.id)
def test_no_room_damage_and_standstill_leave_the_old_version_and_let_the_next_through(
    cell: Damage, tmp_path: Path
) -> None:
    result = run_cell(cell, tmp_path / "cell")
    assert result.ok, result.detail
