"""Payloads of the journal: append-only files of checksummed records.

A file begins with a magic number; a record is its length and CRC-32C (little-endian, 32 bits each), then the bytes. Only
records that a fact names were acknowledged: what follows the last of them was torn by a crash.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import xxhash

from orchestrator_svc.journal.facts import Place

MAGIC = b"SLUICEJ1"
_HEADER = struct.Struct("<II")


class JournalError(Exception):
    """The journal cannot be used; the message says what to do."""


class SegmentError(Exception):
    """A record is not what was written: the file is damaged or missing."""


class Disk:
    """The disk operations of the journal. Tests replace this class by one that fails at any of these calls."""

    def write(self, file: BinaryIO, content: bytes) -> None:
        """Append to a file."""
        file.write(content)

    def sync(self, file: BinaryIO) -> None:
        """Make what was written to a file durable."""
        file.flush()
        os.fdatasync(file.fileno())

    def sync_directory(self, directory: Path) -> None:
        """Make the names of new files durable."""
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def commit(self, connection: sqlite3.Connection) -> None:
        """Commit a transaction of facts."""
        connection.execute("COMMIT")


def segment_path(directory: Path, number: int) -> Path:
    """Return the file of a segment."""
    return directory / f"segment-{number:08d}.bin"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the segments that exist, ascending."""
    return sorted(int(path.stem.removeprefix("segment-")) for path in directory.glob("segment-*.bin"))


def read_payload(directory: Path, place: Place) -> bytes:
    """Return a payload.

    Raises:
        SegmentError: if it is torn, damaged or gone.
        JournalError: if the disk or the system does not let it be read.
    """
    path = segment_path(directory, place.segment)
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise SegmentError(f"{path} ends before the record at {place.offset}")
            length, checksum = _HEADER.unpack(header)
            payload = file.read(length)
    except FileNotFoundError as error:
        raise SegmentError(f"{path} is gone") from error
    except OSError as error:
        raise JournalError(
            f"cannot read {path}, which may not be damaged: {error.strerror}; check the disk and the limit of open files"
        ) from error
    if len(payload) < length or google_crc32c.value(payload) != checksum:
        raise SegmentError(f"the record at {place.offset} of {path} is damaged")
    if place.digest and xxhash.xxh3_128_digest(payload) != place.digest:
        raise SegmentError(f"the record at {place.offset} of {path} is another one than the journal names")
    return payload


class SegmentWriter:
    """Appends payloads. The event loop calls `place`; the journal's thread calls the other methods.

    Args:
        directory: Where the segments lie; made if absent.
        max_bytes: Size after which a new segment is begun.
        after: Number of the last segment that a fact names. It may be deleted, and its number is not used again.
    """

    def __init__(self, directory: Path, max_bytes: int, disk: Disk, *, after: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._max_bytes, self._disk = directory, max_bytes, disk
        # Never append after a torn end: each start begins a new file.
        self._next_segment = max([after, *segment_numbers(directory)]) + 1
        self._next_offset = len(MAGIC)
        self._file: BinaryIO | None = None
        self._written_segment = 0

    def place(self, payload: bytes, digest: bytes) -> Place:
        """Return where a payload with this xxh3-128 will lie; payloads are written in the order of these calls."""
        if self._next_offset >= self._max_bytes and self._next_offset > len(MAGIC):
            self._next_segment, self._next_offset = self._next_segment + 1, len(MAGIC)
        place = Place(self._next_segment, self._next_offset, digest)
        self._next_offset += _HEADER.size + len(payload)
        return place

    def write(self, payloads: Iterable[tuple[Place, bytes]]) -> None:
        """Write payloads at their places and make them durable."""
        file = self._file
        for place, payload in payloads:
            if file is None or place.segment != self._written_segment:
                file = self._begin(place.segment)
            self._disk.write(file, _HEADER.pack(len(payload), google_crc32c.value(payload)) + payload)
        if file is not None:
            self._disk.sync(file)

    def _begin(self, segment: int) -> BinaryIO:
        self.close()
        file = segment_path(self._directory, segment).open("xb")
        self._file, self._written_segment = file, segment
        self._disk.write(file, MAGIC)
        self._disk.sync_directory(self._directory)
        return file

    def close(self) -> None:
        """Sync and close the file."""
        if self._file is not None:
            self._disk.sync(self._file)
            self._file.close()
            self._file = None

    def delete_below(self, number: int | None) -> None:
        """Delete the segments below a number, or all for None. Keep the segment that is written to."""
        for each in segment_numbers(self._directory):
            if each != self._written_segment and (number is None or each < number):
                segment_path(self._directory, each).unlink(missing_ok=True)
