"""The trainer's record of applied batches as it lies on disk: frames in append-only files. The trainer writes it, an audit reads it.

trainer/batches/00000001.record    frames of length, CRC-32 and a serialized BatchRecord (checkpoint.proto)
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from sluice.v1 import checkpoint_pb2

_HEADER = struct.Struct("<II")

_FIRST_BYTE = 0x0A
"""Tag of BatchRecord.policy_version, which every record begins with."""


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The content of one file.

    Attributes:
        records: Its whole frames, in order.
        ends: Offset at which the frame of each record ends, in bytes.
        damaged: Offsets of bytes that are not a frame although a whole frame follows: something changed the file.
        size_bytes: Size of the file. Bytes after the last whole frame were torn by a crash.
    """

    path: Path
    records: tuple[checkpoint_pb2.BatchRecord, ...]
    ends: tuple[int, ...]
    damaged: tuple[int, ...]
    size_bytes: int

    @property
    def whole_bytes(self) -> int:
        """Offset at which the last whole frame ends."""
        return self.ends[-1] if self.ends else 0

    @property
    def torn(self) -> bool:
        """Whether the file ends in a frame that is not whole."""
        return self.whole_bytes < self.size_bytes


def record_directory(run_dir: Path) -> Path:
    """Return the directory of a run's record."""
    return run_dir / "trainer" / "batches"


def record_paths(directory: Path) -> list[Path]:
    """Return the files of a record, oldest first."""
    return sorted(directory.glob("*.record"))


def frame(record: checkpoint_pb2.BatchRecord) -> bytes:
    """Return the frame of one batch."""
    content = record.SerializeToString()
    return _HEADER.pack(len(content), zlib.crc32(content)) + content


def read_record_file(path: Path) -> RecordFile:
    """Read one file.

    Raises:
        OSError: if it cannot be read.
    """
    content = path.read_bytes()
    records: list[checkpoint_pb2.BatchRecord] = []
    ends: list[int] = []
    damaged: list[int] = []
    begin = 0
    while begin < len(content):
        found = _frame_at(content, begin)
        if found is None:
            following = next((at for at in range(begin + 1, len(content)) if _frame_at(content, at)), None)
            if following is None:
                break
            damaged.append(begin)
            begin = following
            continue
        begin, record = found
        records.append(record)
        ends.append(begin)
    return RecordFile(path, tuple(records), tuple(ends), tuple(damaged), len(content))


def _frame_at(content: bytes, begin: int) -> tuple[int, checkpoint_pb2.BatchRecord] | None:
    """Return the end and the batch of the whole frame at an offset; None if there is none."""
    body = begin + _HEADER.size
    if body >= len(content) or content[body] != _FIRST_BYTE:
        return None
    length, checksum = _HEADER.unpack_from(content, begin)
    end = body + length
    if not length or end > len(content) or zlib.crc32(memoryview(content)[body:end]) != checksum:
        return None
    try:
        return end, checkpoint_pb2.BatchRecord.FromString(content[body:end])
    except DecodeError:
        return None
