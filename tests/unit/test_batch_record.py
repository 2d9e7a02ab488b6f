"""The record of applied batches: append-only, whole after a crash, kept for ever, and read along the line of the weights."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

import pytest

from sluice.batch_record import frame, read_record_file
from sluice.rpc import SluiceError
from sluice.v1 import checkpoint_pb2, trainer_pb2
from sluice.versions import BASE, Lineage, Version
from trainer_svc.checkpoint import batch_record
from trainer_svc.checkpoint.batch_record import BatchRecordFiles

FIRST_EPOCH = Lineage().begin(1, BASE)


def record(number: int, epoch: int = 1) -> checkpoint_pb2.BatchRecord:
    return checkpoint_pb2.BatchRecord(
        policy_version=Version(epoch, number).to_proto(),
        batch_id=f"e{epoch}b{number}",
        sequence_no=number,
        content_digest="00",
        results=[trainer_pb2.TrajectoryResult(trajectory_id=f"t{number}", trained_tokens=number)],
    )


def written(directory: Path, *numbers: int, epoch: int = 1) -> BatchRecordFiles:
    files = BatchRecordFiles(directory)
    for number in numbers:
        files.append(record(number, epoch))
    return files


def ids(records: Iterable[checkpoint_pb2.BatchRecord]) -> list[str]:
    return [each.batch_id for each in records]


def read_records(path: Path) -> tuple[checkpoint_pb2.BatchRecord, ...]:
    return read_record_file(path).records


def test_what_was_appended_is_read_again_by_another_process(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    again = BatchRecordFiles(tmp_path)
    again.append(record(3))
    assert again.held_by(Version(1, 3), FIRST_EPOCH, 10) == [record(1), record(2), record(3)]
    assert ids(again.held_by(Version(1, 2), FIRST_EPOCH, 10)) == ["e1b1", "e1b2"]
    assert ids(again.held_by(Version(1, 3), FIRST_EPOCH, 2)) == ["e1b2", "e1b3"]


@pytest.mark.parametrize("lost", [1, 3, 9])
def test_a_torn_end_is_cut_off_and_the_record_goes_on(tmp_path: Path, lost: int) -> None:
    written(tmp_path, 1, 2)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-lost])
    again = BatchRecordFiles(tmp_path)
    assert ids(again.held_by(Version(1, 1), FIRST_EPOCH, 10)) == ["e1b1"]
    again.append(record(2))
    again.append(record(3))
    assert ids(list(read_records(path))) == ["e1b1", "e1b2", "e1b3"]


def test_zeros_that_a_power_cut_left_are_no_batches(tmp_path: Path) -> None:
    written(tmp_path, 1)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes() + bytes(64))
    written(tmp_path, 2)
    assert ids(list(read_records(path))) == ["e1b1", "e1b2"]


def test_batches_that_a_restart_rolled_back_are_not_held(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3)
    files = written(tmp_path, 3, 4, epoch=2)
    lineage = FIRST_EPOCH.begin(2, Version(1, 2))
    assert ids(files.held_by(Version(2, 4), lineage, 10)) == ["e1b1", "e1b2", "e2b3", "e2b4"]
    assert ids(files.held_by(Version(1, 3), lineage, 10)) == ["e1b1", "e1b2", "e1b3"]


def test_after_a_gap_only_what_follows_it_is_held(tmp_path: Path) -> None:
    files = written(tmp_path, 1, 3, 4)
    assert ids(files.held_by(Version(1, 4), FIRST_EPOCH, 10)) == ["e1b3", "e1b4"]
    assert files.held_by(Version(1, 5), FIRST_EPOCH, 10) == []


def test_a_full_file_is_followed_by_the_next_and_none_is_ever_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_record, "FILE_BYTES", 1)
    files = written(tmp_path, *range(1, 101))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{number:08d}.record" for number in range(1, 101)]
    assert ids(files.held_by(Version(1, 100), FIRST_EPOCH, 2)) == ["e1b99", "e1b100"]
    assert len(files.held_by(Version(1, 100), FIRST_EPOCH, 1000)) == 100


@pytest.mark.parametrize("place", [0, 4, 9])  # the length, the checksum, the content
def test_a_damaged_frame_hides_no_later_one_and_is_not_cut_off(tmp_path: Path, place: int) -> None:
    written(tmp_path, 1, 2, 3)
    path = next(tmp_path.iterdir())
    begin = len(frame(record(1)))
    damaged = bytearray(path.read_bytes())
    damaged[begin + place] ^= 0x40
    path.write_bytes(damaged)
    found = read_record_file(path)
    assert (ids(found.records), found.damaged, found.torn) == (["e1b1", "e1b3"], (begin,), False)
    written(tmp_path, 4)
    assert path.read_bytes() == bytes(damaged) + frame(record(4))


def test_a_trajectory_takes_about_forty_bytes_for_ever(tmp_path: Path) -> None:
    results = [
        trainer_pb2.TrajectoryResult(
            trajectory_id=f"g12345-{number % 16}", outcome=1, max_staleness=1, trained_tokens=900, digest=bytes(16)
        )
        for number in range(512)
    ]
    files = BatchRecordFiles(tmp_path)
    files.append(checkpoint_pb2.BatchRecord(batch_id="run-32", sequence_no=32, results=results))
    assert next(tmp_path.iterdir()).stat().st_size < 40 * len(results)


def test_the_position_that_a_checkpoint_names_is_the_end(tmp_path: Path) -> None:
    files = BatchRecordFiles(tmp_path / "batches")
    assert files.position() is None
    files.append(record(1))
    position = files.position()
    assert position is not None
    assert position.file == "batches/00000001.record"
    assert position.size_bytes == (tmp_path / position.file).stat().st_size
    path = tmp_path / position.file
    path.write_bytes(path.read_bytes() + frame(record(2))[:-1])
    assert BatchRecordFiles(tmp_path / "batches").position() == position, "a torn frame is no part of the record"


def test_a_full_disk_is_told_and_leaves_the_record_whole(tmp_path: Path) -> None:
    files = written(tmp_path, 1)
    files.close()
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    files._file = FileIO("/dev/full", "a")
    with pytest.raises(SluiceError, match="free space") as refused:
        files.append(record(2))
    assert refused.value.reason == "BATCH_RECORD_NOT_WRITTEN"
    assert path.read_bytes() == whole
    files.append(record(2))
    assert ids(list(read_records(path))) == ["e1b1", "e1b2"]


def test_a_disk_that_fails_is_no_end_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, or a bad sector: the batches may all be there, so none is reported as unknown."""
    written(tmp_path, 1, 2)
    again = BatchRecordFiles(tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fails)
        with pytest.raises(SluiceError, match="Too many open files") as failed:
            again.held_by(Version(1, 2), FIRST_EPOCH, 10)
    assert failed.value.reason == "BATCH_RECORD_UNREADABLE"
    assert ids(again.held_by(Version(1, 2), FIRST_EPOCH, 10)) == ["e1b1", "e1b2"]
