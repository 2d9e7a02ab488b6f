"""A shard's upload as the service sees it: at most one stream writes to it, the newest."""

from __future__ import annotations

import threading

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.chunks import check_chunk
from weightsync.service.incoming import IncomingShard

__all__ = ["OffsetError", "SupersededError", "Upload"]


class OffsetError(Exception):
    """The chunk does not follow the bytes that are stored."""


class SupersededError(Exception):
    """A newer stream writes to the shard."""


class Upload:
    """One shard of one version; its methods block and may be called from any thread.

    A stream whose client broke off may still be alive here when the client comes back on a new one: each stream holds a
    ticket, and only the newest ticket may write.

    Args:
        shard: The file.
        announced: What the client's header says of it.
        now: Seconds on the service's clock.
    """

    def __init__(self, shard: IncomingShard, announced: pb.Shard, now: float) -> None:
        self.shard = shard
        self.announced = announced
        self.active_at = now
        self._lock = threading.Lock()
        self._ticket: object | None = None

    def take_over(self) -> tuple[object, int]:
        """Make the calling stream the one that writes.

        Returns:
            Its ticket and the bytes that are stored.
        """
        with self._lock:
            self._ticket = object()
            return self._ticket, self.shard.stored

    def write(self, ticket: object, chunk: pb.Chunk) -> None:
        """Store one chunk.

        Raises:
            ChunkError, ChunkSizeError: as `check_chunk`.
            SupersededError, OffsetError, LayoutError, OSError: as `append`.
        """
        data = check_chunk(chunk)
        self.append(ticket, chunk.offset, data)
        self.shard.sums.note(chunk.offset, len(data), chunk.crc32c)

    def append(self, ticket: object, offset: int, data: bytes | memoryview) -> None:
        """Store bytes that are verified.

        Raises:
            SupersededError: if a newer stream took over.
            OffsetError: if they leave a gap or overlap.
            LayoutError, OSError: as `IncomingShard.write`.
        """
        with self._lock:
            self._check(ticket)
            if offset != self.shard.stored:
                raise OffsetError(
                    f"the chunk begins at byte {offset}, expected {self.shard.stored}: send chunks in order"
                )
            self.shard.write(data)

    def flush(self) -> None:
        """Bring what came in so far to the disk, while more comes in; do nothing if the file is closed.

        Raises:
            OSError: if the disk does not take it.
        """
        with self._lock:  # nobody closes the file between the look at its descriptor and the copy
            descriptor = self.shard.duplicate()
        if descriptor is not None:
            self.shard.flush(descriptor)

    def finish(self, ticket: object) -> None:
        """Bring the whole file to the disk.

        Raises:
            SupersededError: if a newer stream took over.
            OSError: if the disk does not take it.
        """
        with self._lock:
            self._check(ticket)
            if not self.shard.complete:
                self.shard.finish()

    def discard(self, ticket: object | None = None) -> bool:
        """Remove the file and end every stream's right to write.

        Args:
            ticket: The stream that asks; None: the service itself, which may always.

        Returns:
            False if a newer stream took over: the file is that one's, and stays.
        """
        with self._lock:
            if ticket is not None and ticket is not self._ticket:
                return False
            self._ticket = None
            self.shard.discard()
            return True

    def close(self) -> None:
        """End every stream's right to write; the file stays."""
        with self._lock:
            self._ticket = None
            self.shard.close()

    def _check(self, ticket: object) -> None:
        if ticket is not self._ticket:
            raise SupersededError("a newer stream pushes this shard; end this one")
