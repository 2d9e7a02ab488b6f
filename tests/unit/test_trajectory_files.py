"""The trajectories of a run as text: one file for each step, and as many as the bound allows."""

from __future__ import annotations

from pathlib import Path

import structlog

from orchestrator_svc.run.recorder import TrajectoryFiles


def steps(directory: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in directory.iterdir())


def test_the_oldest_steps_go_when_all_are_too_large_together(tmp_path: Path) -> None:
    files = TrajectoryFiles(tmp_path, 10)
    for step in range(1, 9):
        files.write(step, "1234")
    assert steps(tmp_path) == [7, 8]
    files.write(9, "twenty letters or so")
    assert steps(tmp_path) == [9], "the last one stays although it is larger than the bound"


def test_without_a_bound_every_step_stays(tmp_path: Path) -> None:
    files = TrajectoryFiles(tmp_path, 0)
    for step in range(5):
        files.write(step, "1234")
    assert steps(tmp_path) == list(range(5))


def test_files_of_earlier_processes_count_and_a_step_that_is_trained_again_counts_once(tmp_path: Path) -> None:
    for step in (1, 2, 999_999, 1_000_000):
        TrajectoryFiles(tmp_path, 0).write(step, "1234")
    again = TrajectoryFiles(tmp_path, 12)
    again.write(2, "12")
    assert steps(tmp_path) == [2, 999_999, 1_000_000]
    again.write(2, "1234")
    assert steps(tmp_path) == [2, 999_999, 1_000_000]
    again.write(3, "1234")
    assert steps(tmp_path) == [3, 999_999, 1_000_000]


def test_an_old_file_that_cannot_be_removed_is_logged_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "step_000001.jsonl").mkdir()
    with structlog.testing.capture_logs() as logged:
        TrajectoryFiles(tmp_path, 1).write(2, "1234")
    assert (tmp_path / "step_000002.jsonl").read_text() == "1234"
    assert [each["event"] for each in logged] == ["cannot remove old trajectories"]
