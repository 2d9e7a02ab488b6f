"""What the files of a run take, by kind, and what bounds each kind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sluice.cli import doctor
from sluice.config import ConfigError, run_config_class
from sluice.config.schema import leaf_paths
from sluice.doctor import machine
from sluice.doctor.settings import check_files
from sluice.run_files import KINDS, OTHER, kind_of, uses

SIZES = {
    "logs/trainer.log": 10,
    "logs/trainer.log.1": 20,
    "calls/orchestrator.jsonl": 1,
    "journal.sqlite": 300,
    "journal.sqlite-wal": 40,
    "journal/segment-00000001.bin": 500,
    "trajectories/step_000001.jsonl": 600,
    "checkpoints/step_1/trainer/model.safetensors": 9000,
    "checkpoints/step_1/manifest.json": 5,
    "weights/v1.1/model.safetensors": 3000,
    "trainer/batches/00000001.record": 70,
    "metrics.jsonl": 8,
    "tensorboard/events": 9,
    "config.toml": 2,
    "report.json": 3,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "demo"
    for name, size in SIZES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    return directory


def found(directory: Path, versions: Path | None = None) -> dict[str, tuple[int, int]]:
    return {each.kind.name: (each.size_bytes, each.files) for each in uses(directory, versions)}


def test_each_kind_is_counted_and_the_largest_comes_first(run_dir: Path) -> None:
    assert list(found(run_dir).items()) == [
        ("checkpoints", (9005, 2)),
        ("versions", (3000, 1)),
        ("trajectories", (600, 1)),
        ("journal, payloads", (500, 1)),
        ("journal, facts", (340, 2)),
        ("records of batches", (70, 1)),
        ("logs", (30, 2)),
        ("metrics", (17, 2)),
        (OTHER, (5, 2)),
        ("log of calls", (1, 1)),
    ]


def test_versions_that_lie_elsewhere_are_counted_there(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "fast/demo"
    elsewhere.mkdir(parents=True)
    (elsewhere / "model.safetensors").write_bytes(bytes(77))
    assert found(run_dir, elsewhere)["versions"] == (77, 1)
    assert "versions" not in found(run_dir, tmp_path / "none")


def test_a_link_to_another_disk_is_followed_once_and_links_in_it_are_not(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other_disk"
    (run_dir / "checkpoints").rename(other)
    (run_dir / "checkpoints").symlink_to(other)
    (other / "everything").symlink_to("/")
    os.link(other / "step_1/manifest.json", other / "same.json")
    assert found(run_dir)["checkpoints"] == (9005, 2)


def test_every_setting_that_bounds_a_kind_is_one() -> None:
    settings = {".".join(path) for path, *_ in leaf_paths(run_config_class())}
    for kind in KINDS:
        for word in re.findall(r"\w+(?:\.\w+)+", kind.bound):
            assert any(each == word or each.startswith(f"{word}.") for each in settings), f"{kind.name}: {word}"
    assert kind_of("journal.v1.sqlite").name == "journal, facts"


def test_doctor_shows_them_with_their_bounds(run_dir: Path) -> None:
    total, first, *_ = check_files(run_dir, None)
    assert total.found == f"{run_dir} takes 0.0 MiB"
    assert "checkpoints, 2 files; bounded by trainer.checkpoint.keep" in first.found
    assert not list(check_files(run_dir / "none", None))


def test_doctor_takes_the_directory_of_a_run_in_place_of_settings(run_dir: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "check_machine", lambda: [machine.check_python()])
    # The import of an engine takes a quarter of a minute.
    monkeypatch.setattr(doctor, "check_engine", lambda library, remedy: machine.check_python())
    (run_dir / "config.toml").write_text('run = "another"\n[orchestrator.disk]\nmin_free_mb = 3\n')
    doctor.run([str(run_dir)])
    said = capsys.readouterr().out
    assert "with less than 3.0 MiB a run pauses (orchestrator.disk.min_free_mb)" in said
    assert "trajectories, 1 file; bounded by orchestrator.disk.trajectories_mb" in said
    (run_dir / "config.toml").unlink()
    assert doctor.run([str(run_dir)]) == 0
    assert "trajectories, 1 file" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="is no directory"):
        doctor.run([str(run_dir / "none")])
