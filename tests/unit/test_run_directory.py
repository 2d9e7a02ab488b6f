"""The directory of a run: one process at a time, never overwritten, and no link in it leads a write elsewhere."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from rich.console import Console

from orchestrator_svc.app import only_writer
from sluice import file_systems
from sluice.cli.quickstart import make_room
from sluice.cli.rl import claim, write_settings
from sluice.config import ConfigError, RunConfig, run_config_class


def run_in(directory: Path) -> RunConfig:
    return run_config_class()(run="r1", output_dir=directory)


def test_a_second_process_is_refused_while_the_first_holds_the_run(tmp_path: Path) -> None:
    with claim(run_in(tmp_path), resume=False) as directory:
        with pytest.raises(ConfigError, match="another process runs 'r1'"), claim(run_in(tmp_path), resume=True):
            pass
        with pytest.raises(ConfigError, match="another process runs in"):
            make_room(directory, Console(file=io.StringIO()))
    with claim(run_in(tmp_path), resume=False):
        pass


def test_a_run_that_exists_is_resumed_or_refused(tmp_path: Path) -> None:
    with claim(run_in(tmp_path), resume=False) as directory:
        (directory / "journal.sqlite").touch()
    with pytest.raises(ConfigError, match="--resume"), claim(run_in(tmp_path), resume=False):
        pass
    with claim(run_in(tmp_path), resume=True) as again:
        assert again == directory


def test_an_earlier_quickstart_is_moved_aside_whole(tmp_path: Path) -> None:
    directory = tmp_path / "quickstart"
    for number in range(2):
        directory.mkdir()
        (directory / "report.json").write_text(str(number))
        make_room(directory, Console(file=io.StringIO()))
    assert not directory.exists()
    assert [(tmp_path / f"quickstart.{number}" / "report.json").read_text() for number in (1, 2)] == ["0", "1"]


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "stranger"
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1" / ".lock").symlink_to(target)
    with pytest.raises(ConfigError, match=r"\.lock"), claim(run_in(tmp_path), resume=False):
        pass
    with pytest.raises(ConfigError, match=r"\.lock"):
        make_room(tmp_path / "r1", Console(file=io.StringIO()))
    assert not target.exists()


def test_the_settings_are_not_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "stranger"
    target.write_text("kept")
    (tmp_path / "r1").mkdir()
    for name in (".config.toml", "config.toml"):
        (tmp_path / "r1" / name).symlink_to(target)
    path = write_settings(run_in(tmp_path))
    assert 'run = "r1"' in path.read_text()
    assert not path.is_symlink()
    assert target.read_text() == "kept"


def test_a_file_system_without_locks_is_named_with_the_remedy(tmp_path: Path, monkeypatch) -> None:
    def flock(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=r"no file locks .*output_dir"), claim(run_in(tmp_path), resume=False):
        pass
    with pytest.raises(ConfigError, match=r"no file locks .*output_dir"), only_writer(tmp_path / "r1"):
        pass


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch) -> Callable[[str], Path]:
    """Let a directory be on a file system of some kind; return it."""

    def mount(kind: str) -> Path:
        mounts, directory = tmp_path / f"{kind}.mountinfo", tmp_path.resolve() / kind
        mounts.write_text(f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {directory} rw,nolock - {kind} there rw\n")
        monkeypatch.setattr(file_systems, "MOUNTS", mounts)
        return directory / "run"

    return mount


def test_an_orchestrator_names_a_network_file_system_and_works_there_if_it_can(mounted: Callable[[str], Path]) -> None:
    with structlog.testing.capture_logs() as logged, only_writer(mounted("nfs4")):
        (warning,) = logged
    assert (warning["log_level"], "nfs4" in warning["problem"]) == ("warning", True)
    assert "second orchestrator" in warning["problem"]
    assert "output_dir" in warning["remedy"]
    with structlog.testing.capture_logs() as logged, only_writer(mounted("ext4")):
        assert logged == []


def test_an_orchestrator_refuses_an_object_store(mounted: Callable[[str], Path]) -> None:
    with (
        pytest.raises(ConfigError, match=r"fuse.gcsfuse.*object store.*output_dir"),
        only_writer(mounted("fuse.gcsfuse")),
    ):
        pass
