"""A trainer is killed at each of its writes to the run's directory: what the next one finds.

One trainer lives, and before each of its calls that change the directory a copy is made: what a SIGKILL there would leave. Where the
call is to make a file durable, the copy of the file also loses its last bytes, as in a kill half-way through the write before it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
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


COMPLETE = "rename test/checkpoints/.step_N.partial"
"""The call that gives a complete checkpoint its name."""


@dataclass(frozen=True)
class Kill:
    """A kill at one call.

    Attributes:
        call: What the call does to which kind of file.
        directory: What it leaves.
        saved: The last checkpoint that the trainer reported.
        reported: The last batch that the trainer reported.
    """

    call: str
    directory: Path
    saved: Version
    reported: Version


class WatchedDisk:
    """Copies a directory before the calls that change it: before the first of each kind, and before the last renaming and removal.

    Attributes:
        kills: The copies.
    """

    def __init__(self, patched: pytest.MonkeyPatch, directory: Path, life: Life) -> None:
        self.kills: dict[str, Kill] = {}
        self._directory, self._life = directory, life
        self._copy = shutil.copytree
        for name in CALLS:
            patched.setattr(os, name, self._guarded(name, getattr(os, name)))

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(target: Any, *arguments: Any, **options: Any) -> Any:
            path = self._path(target, options)
            if path is not None and path.is_relative_to(self._directory) and not (name == "fsync" and path.is_dir()):
                what = f"{name} {_kind(path.relative_to(self._directory).as_posix())}"
                if what not in self.kills:
                    self._note(what, what, path)
                elif name in {"rename", "rmdir"}:
                    self._note(f"last {what}", what, path)
            return call(target, *arguments, **options)

        return guarded

    def _note(self, key: str, call: str, path: Path) -> None:
        left = self._directory.with_name(f"killed-{len(self.kills)}-{len(key)}")
        if key in self.kills:
            left = self.kills[key].directory
            shutil.rmtree(left)
        self._copy(self._directory, left, symlinks=True)
        if call.startswith("f") and path.is_file():
            os.truncate(left / path.relative_to(self._directory), max(0, path.stat().st_size - 7))
        self.kills[key] = Kill(call, left, self._life.saved, self._life.reported)

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
    """Run a trainer for three epochs that keeps two checkpoints, and note which checkpoints and batches it reported.

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


def test_a_trainer_that_is_killed_at_any_write_continues_without_loss(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    life = Life()
    with pytest.MonkeyPatch.context() as patched:
        disk = WatchedDisk(patched, tmp_path / "whole", life)
        life.live(model, tmp_path / "whole")
    assert {kill.call.partition(" ")[0] for kill in disk.kills.values()} >= {
        "fsync",
        "fdatasync",
        "rename",
        "replace",
        "unlink",
        "rmdir",
    }
    assert any(kill.call == COMPLETE for kill in disk.kills.values())
    for kill in disk.kills.values():
        check_that_it_continues(model, kill)


def check_that_it_continues(model: Path, kill: Kill) -> None:
    call = kill.call
    again = learner(model, kill.directory, checkpoint={"keep": 2})
    epoch = again.checkpoints.lineage.newest_epoch + 1
    restored = again.restore(epoch, "")
    assert restored.origin >= kill.saved, f"{call}: a checkpoint that was told of is gone"
    assert restored.origin <= kill.reported, call
    assert call != COMPLETE or restored.origin == kill.reported, (
        f"{call}: a checkpoint that only lacks its name is not used"
    )
    held = [record.sequence_no for record in restored.held]
    assert held == list(range(1, restored.origin.number + 1)), f"{call}: the record lacks a batch of the weights"
    recorded = [
        Version.from_proto(record.policy_version)
        for path in record_paths(record_directory(kill.directory / "test"))
        for record in read_record_file(path).records
    ]
    assert len(set(recorded)) == len(recorded), f"{call}: a batch is recorded twice"
    assert kill.reported == BASE or kill.reported in recorded, f"{call}: a batch that was told of is not recorded"
    left = (
        [path.name for path in again.checkpoints.directory.glob(".*")] if again.checkpoints.directory.exists() else []
    )
    assert not left, f"{call}: {left} stay behind"
    train(again, restored.origin.number + 1)
    again.begin_save(0).result()
    assert names(again)[0] == f"step_{restored.origin.number + 1}", call
