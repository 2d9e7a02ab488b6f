"""A shard on its way in: written, summed and scanned chunk by chunk. Blocking; called in threads, one call at a time."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from weightsync.format.chunks import ChunkSums
from weightsync.format.scan import Scan, ScannedTensor

__all__ = ["IncomingShard"]


class IncomingShard:
    """One file of a version that is not committed yet.

    Args:
        path: Where its bytes go.
        size: Bytes of the whole file.

    Attributes:
        digest: xxh3-128 of the file, hexadecimal; empty until it is whole.
        sums: Checksums of the chunks in which it came.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.digest = ""
        self.sums = ChunkSums(size)
        self._scan = Scan(size)
        self._hash = xxhash.xxh3_128()
        self._failure: OSError | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    @property
    def stored(self) -> int:
        """Bytes received and written, all verified by their crc32c."""
        return self._scan.position

    @property
    def complete(self) -> bool:
        """Whether the file is whole and on disk."""
        return bool(self.digest)

    @property
    def tensors(self) -> dict[str, ScannedTensor]:
        """The entries of the file that are whole, by name."""
        return self._scan.tensors

    @property
    def data_begin(self) -> int:
        """Where the first tensor begins in the file; known once the header is in."""
        return self._scan.data_begin

    def write(self, data: bytes | memoryview) -> None:
        """Take the next bytes, which are verified; the caller sees to the order.

        Raises:
            LayoutError: if the bytes make no safetensors file of the announced size.
            OSError: if the disk does not take them.
        """
        position = self.stored
        self._scan.feed(data)
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._descriptor, rest, position)
            rest, position = rest[written:], position + written
        self._hash.update(data)

    def duplicate(self) -> int | None:
        """Return a second descriptor of the open file, for `flush`; None if the file is closed."""
        return os.dup(self._descriptor) if self._descriptor >= 0 else None

    def flush(self, descriptor: int) -> None:
        """Bring what is written so far to the disk, beside further writes; then `finish` has little left to do.

        Args:
            descriptor: From `duplicate`, because the file may be closed meanwhile; closed here.

        Raises:
            OSError: if the disk does not take it.
        """
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            self._failure = error  # the kernel tells once
            raise
        finally:
            os.close(descriptor)

    def finish(self) -> str:
        """Bring the whole file to the disk and close it.

        Returns:
            xxh3-128 of the file, hexadecimal.

        Raises:
            OSError: if the disk did not take all of it.
        """
        if self._failure is not None:
            raise self._failure
        os.fsync(self._descriptor)
        self.close()
        self.digest = str(self._hash.hexdigest())
        return self.digest

    def close(self) -> None:
        """Give the file descriptor back; the file stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def discard(self) -> None:
        """Close and remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)
