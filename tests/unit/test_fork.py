"""A fork: another run from a checkpoint, with the facts of its cut. The old run is only read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from run_on_disk import RunOnDisk, a_life, lived
from simulated_run import EPISODES

from orchestrator_svc.commands import fork as fork_module
from orchestrator_svc.commands.audit import audit_run
from orchestrator_svc.commands.fork import FORKED, fork, run
from orchestrator_svc.journal import DATABASE
from orchestrator_svc.journal.ledger import Ledger, folded
from orchestrator_svc.journal.segments import segment_numbers
from orchestrator_svc.journal.store import JournalLimits, read_facts
from sluice.batch_record import read_record_file, record_directory, record_paths
from sluice.checkpoint_files import MANIFEST, read_manifest
from sluice.config import ConfigError
from sluice.v1 import checkpoint_pb2
from sluice.versions import Version


def content(directory: Path) -> dict[str, bytes]:
    """Return all files, except the files that SQLite makes for a reader."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


def state(directory: Path) -> Ledger:
    return folded(read_facts(directory))


def manifest_of(directory: Path, name: str) -> checkpoint_pb2.CheckpointManifest:
    manifest = read_manifest(directory / "checkpoints" / name / MANIFEST)
    assert manifest is not None
    return manifest


def old_run(directory: Path, live: Callable[[RunOnDisk], None] = a_life, limits: JournalLimits | None = None) -> Path:
    lived(directory / "old", live, limits=limits)
    (directory / "old" / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "reward/mean": 0.5}) + "\n" for step in range(1, 5))
    )
    return directory / "old"


def test_a_fork_has_the_cut_and_nothing_after_it(tmp_path: Path) -> None:
    old = old_run(tmp_path)
    before = content(old)
    forked = fork(old, "step_2", tmp_path / "new")
    assert content(old) == before, "the old run is as it was"
    position = manifest_of(old, "step_2").checkpoint.journal_position
    assert (forked.origin, forked.step) == (f"old/step_2@{position}", 2)
    facts = list(read_facts(tmp_path / "new"))
    assert facts[:-1] == list(read_facts(old))[:position]
    started = facts[-1][1].process_started
    assert (started.forked_from, dict(started.identity)) == (forked.origin, {"run": "new"})
    ledger = state(tmp_path / "new")
    assert (ledger.applied, ledger.allotted, ledger.forked_from) == (2, 1, forked.origin)
    assert manifest_of(tmp_path / "new", "step_2").run == "runs/new"
    (path,) = record_paths(record_directory(tmp_path / "new"))
    assert [each.sequence_no for each in read_record_file(path).records] == [1, 2]
    assert len((tmp_path / "new" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_fork_is_exact_and_so_is_what_it_goes_on_to_do(tmp_path: Path) -> None:
    old = old_run(tmp_path)
    fork(old, "step_2", tmp_path / "new")
    result = audit_run(tmp_path / "new")
    assert (result.differences, result.version, result.batches) == ((), Version(1, 2), 2)

    lived(tmp_path / "new", lambda run: run.trains(2), name="new")
    result = audit_run(tmp_path / "new")
    assert (result.differences, result.version, result.batches) == ((), Version(2, 4), 4)
    assert audit_run(old).version == Version(2, 4)


def covers_its_payloads(run: RunOnDisk) -> None:
    """A checkpoint whose unfinished groups were trained, and covered, before the fork."""
    run.trains(1)
    for _ in range(5):
        run.group_is_accepted()
    run.batch_is_made()
    run.batch_is_made()
    run.checkpoint_is_written()
    for _ in range(2):
        run.trainer_applies()
        run.orchestrator_hears()
    run.checkpoint_is_written()
    run.trains(1)
    run.checkpoint_is_written()
    run.trains(1)
    run.checkpoint_is_written()


def test_what_a_later_checkpoint_covered_is_dropped_and_its_tasks_are_drawn_again(tmp_path: Path) -> None:
    old = old_run(tmp_path, covers_its_payloads, limits=JournalLimits(segment_bytes=64))
    kept = set(segment_numbers(old / "journal"))
    forked = fork(old, "step_1", tmp_path / "new")
    ledger = state(tmp_path / "new")
    assert forked.dropped
    assert ledger.dropped[FORKED] == forked.dropped * EPISODES
    assert [each.reason for each in ledger.redraws] == [FORKED] * forked.dropped
    assert not ledger.batches, "batches that lost a group, and those after them, are made again"
    assert set(segment_numbers(tmp_path / "new" / "journal")) <= kept
    result = audit_run(tmp_path / "new")
    assert (result.differences, result.dropped[FORKED]) == ((), forked.dropped * EPISODES)


def test_payloads_that_the_old_run_still_has_go_along_by_link(tmp_path: Path) -> None:
    def live(run: RunOnDisk) -> None:
        run.trains(1)
        run.group_is_accepted()
        run.group_is_accepted()
        run.batch_is_made()
        run.group_is_accepted()
        run.checkpoint_is_written()
        run.trains(1)

    old = old_run(tmp_path, live, limits=JournalLimits(segment_bytes=64))
    forked = fork(old, "step_1", tmp_path / "new")
    ledger = state(tmp_path / "new")
    assert (forked.kept, forked.dropped, list(ledger.batches)) == (3, 0, [2])
    linked = segment_numbers(tmp_path / "new" / "journal")
    needed = {each.place.segment for group in ledger.groups.values() for each in group.trajectories}
    assert set(linked) == needed
    assert len(linked) < len(segment_numbers(old / "journal")), "what came after the cut stays behind"
    name = f"segment-{linked[0]:08d}.bin"
    assert (old / "journal" / name).samefile(tmp_path / "new" / "journal" / name)
    assert not audit_run(tmp_path / "new").differences


def test_a_checkpoint_without_a_position_is_cut_where_its_last_batch_was_noted(tmp_path: Path) -> None:
    old = old_run(tmp_path)
    path = old / "checkpoints" / "step_2" / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["checkpoint"]["journal_position"]
    path.write_text(json.dumps(manifest))
    fork(old, "step_2", tmp_path / "new")
    assert list(read_facts(tmp_path / "new"))[-2][1].batch_applied.sequence_no == 2
    assert not audit_run(tmp_path / "new").differences


def test_a_fork_that_was_killed_leaves_no_run_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = old_run(tmp_path)

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(fork_module, "_copy_facts", killed)
        with pytest.raises(SystemExit):
            fork(old, "step_2", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    fork(old, "step_2", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_what_cannot_be_forked_is_refused_with_the_reason(tmp_path: Path) -> None:
    old = old_run(tmp_path)

    def refused(checkpoint: str, new: str = "new") -> str:
        with pytest.raises(ConfigError) as error:
            run([checkpoint, new, "--output-dir", str(tmp_path)])
        return str(error.value)

    assert "give RUN/step_N" in refused("old")
    assert "no run 'other'" in refused("other/step_2")
    assert "choose one of step_2" in refused("old/step_7")
    assert "exists: choose another name" in refused("old/step_2", "old")
    manifest = old / "checkpoints" / "step_2" / MANIFEST
    text = manifest.read_text()
    manifest.write_text(text[:-20])
    assert "is no complete checkpoint" in refused("old/step_2")
    changed = json.loads(text)
    changed["checkpoint"]["journal_position"] = "999999"
    manifest.write_text(json.dumps(changed))
    assert "names fact 999999, but the journal ends at fact" in refused("old/step_2")
    manifest.write_text(text)
    state_file = next(manifest.parent.glob("state/*"))
    state_file.write_bytes(b"other")
    assert "was changed after it was written" in refused("old/step_2")
    assert not (tmp_path / "new").exists()
    shutil.rmtree(old / "journal")
    (old / DATABASE).unlink()
    assert "no run" in refused("old/step_2")


def test_all_of_a_fork_is_on_disk_before_its_name_and_the_name_before_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves no fork or a whole one."""
    old, new = old_run(tmp_path), tmp_path / "new"
    calls: list[tuple[str, Path]] = []
    held: dict[str, list[Path]] = {}
    sync, rename = os.fsync, Path.rename

    def noting_sync(descriptor: int) -> None:
        calls.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    def noting_rename(path: Path, target: Path) -> Path:
        held["built"] = [path, *path.rglob("*")]
        calls.append(("rename", path))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    fork(old, "step_2", new)
    named = next(index for index, (call, _) in enumerate(calls) if call == "rename")
    synced = {path: index for index, (call, path) in enumerate(calls) if call == "fsync"}
    assert len(held["built"]) > 5
    for path in held["built"]:
        assert synced.get(path, named) < named, f"{path} is named before it is on disk"
        if path.is_dir():
            continue
        directory = calls[named][1] if path.parent == calls[named][1] else path.parent
        assert synced[path] < synced[directory], "a directory is synced after its files"
    assert synced.get(new.parent, -1) > named, "the new name is on disk when the fork is reported"
