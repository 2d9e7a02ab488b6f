"""A shard that is being pushed: its bytes are checked, scanned and written chunk by chunk. Blocking; called in threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import xxhash

from sluice.host_files import PeerFileError
from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.chunks import MAX_CHUNK_BYTES, ChunkSums, check_chunk
from weightsync.format.safetensors import Scan, ScannedTensor

__all__ = ["OffsetError", "SupersededError", "Upload"]


class OffsetError(Exception):
    """The chunk does not follow the bytes that are stored."""


class SupersededError(Exception):
    """A newer stream writes to the shard."""


class Upload:
    """One shard of a version that is not committed yet.

    The stream of a client that broke off may still be alive here when the client comes back on a new one. Each stream
    therefore takes a ticket, and only the newest ticket may write or discard.

    Args:
        path: The file to write.
        announced: What the client's header says of the shard: its name, its size and perhaps its digest.
        now: Seconds on the service's clock.

    Attributes:
        size: Bytes of the whole file.
        digest: xxh3-128 of the file, hexadecimal; empty until the file is whole and on disk.
        sums: Checksums of the chunks in which it came.
        active_at: When the last chunk came, on the service's clock.
    """

    def __init__(self, path: Path, announced: pb.Shard, now: float) -> None:
        self.path = path
        self.announced = announced
        self.size: int = announced.size_bytes
        self.digest = ""
        self.sums = ChunkSums(self.size)
        self.active_at = now
        self._scan = Scan(self.size)
        self._hash = xxhash.xxh3_128()
        self._disk_failure: OSError | None = None
        self._lock = threading.Lock()
        self._ticket: object | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    @property
    def stored(self) -> int:
        """Return how many bytes came in and were written; all of them passed their crc32c."""
        return self._scan.position

    @property
    def complete(self) -> bool:
        """Return whether the file is whole and on disk."""
        return bool(self.digest)

    @property
    def tensors(self) -> Mapping[str, ScannedTensor]:
        """Return the tensors of the file that are whole, by name."""
        return self._scan.tensors

    @property
    def data_begin(self) -> int:
        """Return where the first tensor begins in the file; known once the header is in."""
        return self._scan.data_begin

    def take_over(self) -> tuple[object, int]:
        """Make the calling stream the only one that may write.

        Returns:
            Its ticket and the number of bytes that are stored.
        """
        with self._lock:
            self._ticket = object()
            return self._ticket, self.stored

    def write(self, ticket: object, chunk: pb.Chunk) -> None:
        """Check and store one chunk.

        Raises:
            ChunkError, ChunkSizeError: as `check_chunk`.
            SupersededError, OffsetError, LayoutError, OSError: as `append`.
        """
        data = check_chunk(chunk)
        self.append(ticket, chunk.offset, data)
        self.sums.note(chunk.offset, len(data), chunk.crc32c)

    def copy(self, ticket: object, source: int, end: int) -> None:
        """Store bytes of an open file of the same host, from where the upload stands to before `end`.

        Args:
            ticket: The calling stream's.
            source: Descriptor of the file.
            end: Byte at which to stop.

        Raises:
            PeerFileError: if the file ends before.
            SupersededError, OffsetError, LayoutError, OSError: as `append`.
        """
        while (begin := self.stored) < end:
            data = os.pread(source, min(MAX_CHUNK_BYTES, end - begin), begin)
            if not data:
                raise PeerFileError(f"the file ends at byte {begin}, before byte {end}")
            self.append(ticket, begin, data)

    def append(self, ticket: object, offset: int, data: bytes | memoryview) -> None:
        """Store bytes whose checksum is verified.

        Raises:
            SupersededError: if a newer stream took over.
            OffsetError: if they leave a gap or overlap.
            LayoutError: if the bytes are not those of a safetensors file of the announced size.
            OSError: if the disk does not take them.
        """
        with self._lock:
            self._check(ticket)
            if offset != self.stored:
                raise OffsetError(f"the chunk begins at byte {offset}, expected {self.stored}: send chunks in order")
            self._scan.feed(data)
            rest, position = memoryview(data), offset
            while rest:
                written = os.pwrite(self._descriptor, rest, position)
                rest, position = rest[written:], position + written
            self._hash.update(data)

    def flush(self) -> None:
        """Bring the bytes so far to the disk while more come in, so that `finish` has little left to do.

        Without effect if the file is closed by now.

        Raises:
            OSError: if the disk does not take it; `finish` raises it again, because the kernel reports it once.
        """
        with self._lock:  # nobody closes the file between the look at its descriptor and the copy
            descriptor = os.dup(self._descriptor) if self._descriptor >= 0 else -1
        if descriptor < 0:
            return
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            self._disk_failure = error
            raise
        finally:
            os.close(descriptor)

    def finish(self, ticket: object) -> None:
        """Bring the whole file to the disk, close it and set its digest. Idempotent.

        Raises:
            SupersededError: if a newer stream took over.
            OSError: if the disk did not take all of it.
        """
        with self._lock:
            self._check(ticket)
            if self.complete:
                return
            if self._disk_failure is not None:
                raise self._disk_failure
            os.fsync(self._descriptor)
            self._close_file()
            self.digest = self._hash.hexdigest()

    def discard(self, ticket: object | None = None) -> bool:
        """Remove the file and end every stream's right to write.

        Args:
            ticket: The calling stream's; None: the service itself, which may always discard.

        Returns:
            False if a newer stream took over. The file is that one's then, and stays.
        """
        with self._lock:
            if ticket is not None and ticket is not self._ticket:
                return False
            self._ticket = None
            self._close_file()
            self.path.unlink(missing_ok=True)
            return True

    def close(self) -> None:
        """End every stream's right to write; the file stays."""
        with self._lock:
            self._ticket = None
            self._close_file()

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _check(self, ticket: object) -> None:
        if ticket is not self._ticket:
            raise SupersededError("a newer stream pushes this shard; end this one")
