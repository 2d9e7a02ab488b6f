"""A safetensors file in shared memory, while it is made and when it is read."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

from weightsync.format.layout import (
    HEADER_LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Entry,
    LayoutError,
    parse_header,
)

__all__ = ["FileLayout", "copy_file", "read_layout", "write_all"]

_COPY_BYTES = 8 << 20
"""A copy looks this often whether it is still wanted."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where the tensors of a file lie.

    Attributes:
        data_begin: First byte behind the header.
        entries: Its tensors by name; their positions count from `data_begin`.
        size: Bytes of the file.
    """

    data_begin: int
    entries: Mapping[str, Entry]
    size: int


def read_layout(descriptor: int) -> FileLayout:
    """The layout of an open safetensors file.

    Raises:
        LayoutError: if it is none.
        OSError: if it cannot be read.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, HEADER_LENGTH_BYTES, 0), "little")
    begin = HEADER_LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or begin > size:
        raise LayoutError(f"a header of {length} bytes: not a safetensors file, or cut off")
    text = os.pread(descriptor, length, HEADER_LENGTH_BYTES)
    entries = parse_header(text)
    end = begin + (entries[-1].end if entries else 0)
    if end != size:
        raise LayoutError(f"header and tensors make {end} bytes, the file has {size}")
    return FileLayout(begin, {entry.name: entry for entry in entries}, size)


def write_all(descriptor: int, data: bytes | memoryview, position: int) -> None:
    """Write every byte.

    Raises:
        OSError: if there is no room.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, position)
        rest, position = rest[written:], position + written


def copy_file(source: Path, descriptor: int, stop: threading.Event) -> None:
    """Copy a file into an open, empty one; other threads run meanwhile.

    Reading through a map and writing by calls is twice as fast on tmpfs as `os.copy_file_range` or two maps, and a full
    memory is an error instead of a signal.

    Args:
        source: A file that nobody changes.
        descriptor: The copy.
        stop: Ends the copy early when it is set.

    Raises:
        OSError: if it cannot be read, or there is no room.
    """
    with source.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        os.ftruncate(descriptor, size)
        with mmap(file.fileno(), size, access=ACCESS_READ) as mapped, memoryview(mapped) as view:
            for begin in range(0, size, _COPY_BYTES):
                if stop.is_set():
                    return
                with view[begin : begin + _COPY_BYTES] as part:
                    write_all(descriptor, part, begin)
