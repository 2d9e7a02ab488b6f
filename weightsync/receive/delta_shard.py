"""A shard of a delta in memory: an ordinary safetensors file whose entries are the encoded slices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.chunks import RawChunk
from weightsync.format.manifest import box, entry_name
from weightsync.format.safetensors import HEADER_LENGTH_BYTES, MAX_HEADER_BYTES, Entry, LayoutError, parse_header
from weightsync.receive.staging import StagingError

__all__ = ["DeltaShard"]


class DeltaShard:
    """Takes a shard's bytes, then gives its entries.

    Args:
        shard: What was announced; its size bounds the memory.
    """

    def __init__(self, shard: pb.Shard) -> None:
        self.shard = shard
        self.position = 0
        self._bytes = np.empty(shard.size_bytes, dtype=np.uint8).data
        self._entries: Mapping[str, Entry] = {}
        self._data_begin = 0

    def feed(self, chunk: RawChunk) -> None:
        """Take the next bytes; see `ChunkSink`."""
        end = self.position + len(chunk.data)
        if chunk.offset != self.position or end > len(self._bytes):
            raise StagingError(
                f"shard {self.shard.name}: a chunk at byte {chunk.offset} came instead of {self.position}"
            )
        self._bytes[self.position : end] = chunk.check()
        self.position = end

    def finish(self) -> None:
        """Check that the whole file came, and what it holds.

        Raises:
            StagingError: if it is another file than announced.
        """
        name = self.shard.name
        if self.position != len(self._bytes):
            raise StagingError(f"shard {name} ended at byte {self.position} of {len(self._bytes)}")
        digest = xxhash.xxh3_128(self._bytes).hexdigest()
        if digest != self.shard.digest:
            raise StagingError(f"shard {name} has digest {digest}, announced was {self.shard.digest}")
        try:
            self._read_header()
        except LayoutError as error:
            raise StagingError(f"shard {name}: {error}") from error
        expected = {entry_name(each) for each in self.shard.tensors if each.encoding != pb.TENSOR_ENCODING_UNCHANGED}
        if expected != self._entries.keys():
            raise StagingError(f"shard {name} does not hold the announced entries")

    def _read_header(self) -> None:
        length = int.from_bytes(self._bytes[:HEADER_LENGTH_BYTES], "little")
        self._data_begin = HEADER_LENGTH_BYTES + length
        if length > MAX_HEADER_BYTES or self._data_begin > len(self._bytes):
            raise LayoutError(f"a header of {length} bytes: not a safetensors file, or cut off")
        entries = parse_header(self._bytes[HEADER_LENGTH_BYTES : self._data_begin])
        size = self._data_begin + (entries[-1].end if entries else 0)
        if size != len(self._bytes):
            raise LayoutError(f"header and entries make {size} bytes, not {len(self._bytes)}")
        self._entries = {entry.name: entry for entry in entries}

    def data(self, tensor: pb.TensorSlice) -> memoryview:
        """The encoded bytes of a slice; empty for one that did not change.

        Raises:
            StagingError: if the entry has another type or shape than its encoding asks for.
        """
        if tensor.encoding == pb.TENSOR_ENCODING_UNCHANGED:
            return self._bytes[:0]
        entry = self._entries[entry_name(tensor)]
        plain = tensor.encoding in {pb.TENSOR_ENCODING_UNSPECIFIED, pb.TENSOR_ENCODING_DENSE}
        wanted = (tensor.dtype, box(tensor).sizes) if plain else ("U8", (entry.size,))
        if (entry.dtype, entry.shape) != wanted:
            raise StagingError(
                f"entry {entry.name} of shard {self.shard.name} is {entry.dtype} {list(entry.shape)}, expected"
                f" {wanted[0]} {list(wanted[1])}"
            )
        return self._bytes[self._data_begin + entry.begin : self._data_begin + entry.end]
