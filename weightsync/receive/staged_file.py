"""A safetensors file in shared memory, while it is made and when it is read."""

from __future__ import annotations

import os
import threading
from mmap import ACCESS_READ, mmap
from pathlib import Path

__all__ = ["copy_file", "write_all"]

_COPY_BYTES = 8 << 20
"""A copy looks this often whether it is still wanted."""


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
