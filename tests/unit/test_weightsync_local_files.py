"""A receiver reads the files that the service names on its host, and only those."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from sluice.v1 import weightsync_pb2 as pb
from weightsync.receive.pull import PullError, read_local


class Bytes:
    """Keeps the bytes that it is fed."""

    def __init__(self) -> None:
        self.data = b""

    @property
    def position(self) -> int:
        """See `ChunkSink`."""
        return len(self.data)

    def feed(self, offset: int, data: memoryview) -> None:
        """See `ChunkSink`."""
        assert offset == self.position
        self.data += bytes(data)


def named(path: Path) -> pb.LocalFile:
    status = path.lstat()
    return pb.LocalFile(shard="model", path=str(path), device=status.st_dev, inode=status.st_ino)


def test_a_named_file_fills_the_sink(tmp_path: Path) -> None:
    path, sink = tmp_path / "model", Bytes()
    path.write_bytes(b"weights")
    read_local(named(path), 7, sink, 7)
    assert sink.data == b"weights"


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Opened as a file it would wait for a writer: the engine would never take another version."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    failures: list[Exception] = []

    def read() -> None:
        try:
            read_local(named(path), 0, Bytes(), 1)
        except PullError as error:
            failures.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert "not a regular file" in str(failures)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"secret!")
    link.symlink_to(target)
    status = target.stat()
    with pytest.raises(PullError):
        read_local(pb.LocalFile(path=str(link), device=status.st_dev, inode=status.st_ino), 7, Bytes(), 7)
