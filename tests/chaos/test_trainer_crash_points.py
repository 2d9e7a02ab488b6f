"""A trainer is killed at each of its writes to the run's directory: what the next one finds.

The disk dies at one call: nothing that the trainer does after it has an effect, as after SIGKILL. Where the call is to make a
file durable, the file also loses its last bytes, as in a kill half-way through the write before it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from small_learner import learner, names, train
from tiny_policy import tiny_model

from sluice.batch_record import read_record_file, record_directory, record_paths
from sluice.versions import BASE, Version
from trainer_svc.service.learner import Learner

pytestmark = pytest.mark.slow

CALLS = ("fsync", "fdatasync", "rename", "replace", "unlink", "rmdir", "truncate")
"""What changes a directory, and what ends the writing of a file. A kill before a new directory is one before the file in it."""


class Killed(BaseException):
    """The trainer was killed."""


class DyingDisk:
    """Count the calls that change a directory, and die at one of them.

    Args:
        dies_at: Number of that call, from 0; None: live.
    """

    def __init__(self, patched: pytest.MonkeyPatch, directory: Path, dies_at: int | None) -> None:
        self.calls: list[str] = []
        self._directory, self._dies_at, self._dead = directory, dies_at, False
        for name in CALLS:
            patched.setattr(os, name, self._guarded(name, getattr(os, name)))

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(target: Any, *arguments: Any, **options: Any) -> Any:
            path = self._path(target, options)
            if path is None or not path.is_relative_to(self._directory) or (name == "fsync" and path.is_dir()):
                return call(target, *arguments, **options)
            if self._dead:
                raise Killed
            if len(self.calls) == self._dies_at:
                self._dead = True
                if name.startswith("f") and path.is_file():
                    with path.open("r+b") as file:
                        file.truncate(max(0, path.stat().st_size - 7))
                raise Killed
            self.calls.append(f"{name} {_kind(path.relative_to(self._directory).as_posix())}")
            return call(target, *arguments, **options)

        return guarded

    @staticmethod
    def _path(target: Any, options: dict[str, Any]) -> Path | None:
        if isinstance(target, int):
            return Path(f"/proc/self/fd/{target}").readlink()
        if (directory := options.get("dir_fd")) is not None:
            return Path(f"/proc/self/fd/{directory}").readlink() / os.fspath(target)
        return Path(os.fspath(target))


def _kind(path: str) -> str:
    """Return a path without what differs between two files of one kind."""
    path = re.sub(r"(hf|state)/[^/]+$", r"\1/FILE", path)
    return re.sub("[0-9]+", "N", re.sub(r"[.]hf[.].*", ".hf.partial", path))


class Life:
    """Three epochs of a trainer, of whose checkpoints two stay; it notes what anyone was told.

    The last epoch goes back to a checkpoint, and replaces the one after it.
    """

    def __init__(self) -> None:
        self.saved = self.reported = BASE

    def live(self, model: Path, directory: Path) -> None:
        policy = learner(model, directory, checkpoint={"keep": 2})
        self._epoch(policy, 1, 1, 2, 3)
        policy = learner(model, directory, checkpoint={"keep": 2})
        self._epoch(policy, 2, 4)
        self.saved = Version(1, 3)
        self._epoch(policy, 3, 4, checkpoint="step_3")
        policy.begin_save(99).result()  # of the same version: it notes the later position

    def _epoch(self, policy: Learner, epoch: int, *numbers: int, checkpoint: str = "") -> None:
        policy.restore(epoch, checkpoint)
        for number in numbers:
            train(policy, number)
            self.reported = policy.version
            policy.begin_save(number).result()
            self.saved = policy.version


def points(model: Path, directory: Path) -> dict[int, str]:
    """Return what each call to die at does to which file: the first of each kind, and the last renaming and removal."""
    with pytest.MonkeyPatch.context() as patched:
        disk = DyingDisk(patched, directory, None)
        Life().live(model, directory)
    first = {call: number for number, call in reversed(list(enumerate(disk.calls)))}
    last = {call: number for number, call in enumerate(disk.calls) if call.startswith(("rename", "rmdir"))}
    return {number: call for call, number in sorted([*first.items(), *last.items()], key=lambda each: each[1])}


def test_a_trainer_that_is_killed_at_any_write_continues_without_loss(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    found = points(model, tmp_path / "whole")
    assert {call.partition(" ")[0] for call in found.values()} >= {
        "fsync",
        "fdatasync",
        "rename",
        "replace",
        "unlink",
        "rmdir",
    }
    for number, call in found.items():
        directory = tmp_path / f"run-{number}"
        life = Life()
        with pytest.MonkeyPatch.context() as patched:
            DyingDisk(patched, directory, number)
            with pytest.raises(Killed):
                life.live(model, directory)
        again = learner(model, directory, checkpoint={"keep": 2})
        epoch = again.checkpoints.lineage.newest_epoch + 1
        restored = again.restore(epoch, "")
        assert restored.origin >= life.saved, f"{call}: a checkpoint that was told of is gone"
        assert restored.origin <= life.reported, call
        held = [record.sequence_no for record in restored.held]
        assert held == list(range(1, restored.origin.number + 1)), f"{call}: the record lacks a batch of the weights"
        recorded = [
            Version.from_proto(record.policy_version)
            for path in record_paths(record_directory(directory / "test"))
            for record in read_record_file(path).records
        ]
        assert len(set(recorded)) == len(recorded), f"{call}: a batch is recorded twice"
        assert life.reported == BASE or life.reported in recorded, f"{call}: a batch that was told of is not recorded"
        left = (
            [path.name for path in again.checkpoints.directory.glob(".*")]
            if again.checkpoints.directory.exists()
            else []
        )
        assert not left, f"{call}: {left} stay behind"
        train(again, restored.origin.number + 1)
        again.begin_save(0).result()
        assert names(again)[0] == f"step_{restored.origin.number + 1}", call
