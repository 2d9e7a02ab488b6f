"""Append-only files of checksummed records: the payloads of the journal.

A segment begins with a magic number; each record is its length and CRC-32C (little-endian 32-bit each), then the bytes.
Only records that the index names were acknowledged: what follows the last of them was torn by a crash.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import google_crc32c

__all__ = ["Location", "SegmentError", "SegmentWriter", "read_record", "segment_numbers"]

MAGIC = b"SLUICEJ1"
_HEADER = struct.Struct("<II")


class SegmentError(Exception):
    """A record is not what was written: the file is damaged or missing."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a record lies: number of the segment, offset of its header in bytes."""

    segment: int
    offset: int


def segment_path(directory: Path, number: int) -> Path:
    """Return the file of a segment."""
    return directory / f"segment-{number:08d}.bin"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the segments that exist, ascending."""
    return sorted(int(path.stem.removeprefix("segment-")) for path in directory.glob("segment-*.bin"))


def read_record(directory: Path, location: Location) -> bytes:
    """Return the bytes of one record.

    Raises:
        SegmentError: if the record is torn, damaged or gone.
    """
    path = segment_path(directory, location.segment)
    try:
        with path.open("rb") as file:
            file.seek(location.offset)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise SegmentError(f"{path} ends before the record at {location.offset}")
            length, checksum = _HEADER.unpack(header)
            payload = file.read(length)
    except OSError as error:
        raise SegmentError(f"cannot read {path}: {error.strerror}") from error
    if len(payload) < length or google_crc32c.value(payload) != checksum:
        raise SegmentError(f"the record at {location.offset} of {path} is damaged")
    return payload


class SegmentWriter:
    """Appends records; use it from one thread.

    Args:
        directory: Where the segments lie; made if absent.
        max_bytes: Size after which a new segment is begun.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._max_bytes = directory, max_bytes
        # Never append behind a torn end: each start begins a file of its own.
        self._number = max(segment_numbers(directory), default=0)
        self._file: BinaryIO | None = None
        self._size = 0
        self._dirty = False

    @property
    def number(self) -> int:
        """Number of the segment that is written to, or of the last one before it."""
        return self._number

    def append(self, payload: bytes) -> Location:
        """Write one record, which is durable after `sync`, and return where it lies."""
        file = self._open()
        location = Location(self._number, self._size)
        file.write(_HEADER.pack(len(payload), google_crc32c.value(payload)))
        file.write(payload)
        self._size += _HEADER.size + len(payload)
        self._dirty = True
        return location

    def sync(self) -> None:
        """Make everything appended durable."""
        if self._file is not None and self._dirty:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._dirty = False

    def close(self) -> None:
        """Sync and close."""
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None

    def delete_below(self, number: int) -> int:
        """Delete the segments below a number; return how many."""
        old = [each for each in segment_numbers(self._directory) if each < number and each != self._number]
        for each in old:
            segment_path(self._directory, each).unlink(missing_ok=True)
        return len(old)

    def _open(self) -> BinaryIO:
        if self._file is None or self._size >= self._max_bytes:
            self.close()
            self._number += 1
            self._file = segment_path(self._directory, self._number).open("xb")
            self._file.write(MAGIC)
            self._size = len(MAGIC)
            _sync_directory(self._directory)
        return self._file


def _sync_directory(directory: Path) -> None:
    """Make the name of a new file durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
