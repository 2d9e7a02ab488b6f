"""One pass over a safetensors file as its bytes arrive: layout, digest of each tensor, finiteness."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from weightsync.format.dtypes import DTYPES, Dtype, all_finite
from weightsync.format.layout import HEADER_LENGTH_BYTES, MAX_HEADER_BYTES, Entry, LayoutError, parse_header

__all__ = ["Scan", "ScannedTensor"]


@dataclass(frozen=True, slots=True)
class ScannedTensor:
    """A tensor whose bytes have all passed.

    Attributes:
        entry: Where it lies.
        digest: xxh3-128 of its bytes, hexadecimal.
        finite: Whether no element is NaN or infinite.
    """

    entry: Entry
    digest: str
    finite: bool


class Scan:
    """Consumes a file's bytes in order, whatever the cuts between them.

    Args:
        size: Bytes of the whole file.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.position = 0
        self.tensors: dict[str, ScannedTensor] = {}
        self.entries: list[Entry] | None = None
        self.data_begin = 0
        self._head = bytearray()
        self._next = 0
        self._open: _OpenTensor | None = None

    @property
    def complete(self) -> bool:
        """Whether every byte has passed."""
        return self.position == self.size

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes.

        Raises:
            LayoutError: if they are not those of a safetensors file of the announced size.
        """
        if self.position + len(data) > self.size:
            raise LayoutError(f"more bytes than the announced {self.size}")
        rest = memoryview(data)
        if self.entries is None:
            rest = self._feed_header(rest)
        if self.entries is not None:
            self._feed_tensors(self.entries, rest)
        self.position += len(data)
        if self.complete and self._next != len(self.entries or ()):
            raise LayoutError(f"the file ends after {self.size} bytes, inside its header or a tensor")

    def _feed_header(self, data: memoryview) -> memoryview:
        """Collect header bytes; give back those behind the header."""
        before = len(self._head)
        self._head += data
        if len(self._head) < HEADER_LENGTH_BYTES:
            return data[len(data) :]
        length = int.from_bytes(self._head[:HEADER_LENGTH_BYTES], "little")
        self.data_begin = HEADER_LENGTH_BYTES + length
        if length > MAX_HEADER_BYTES or self.data_begin > self.size:
            raise LayoutError(f"a header of {length} bytes: not a safetensors file, or cut off")
        if len(self._head) < self.data_begin:
            return data[len(data) :]
        entries = parse_header(memoryview(self._head)[HEADER_LENGTH_BYTES : self.data_begin])
        data_size = entries[-1].end if entries else 0
        if self.data_begin + data_size != self.size:
            raise LayoutError(
                f"header and tensors make {self.data_begin + data_size} bytes, not the announced {self.size}"
            )
        self._head = bytearray()
        self.entries = entries
        self._close_empty(entries)
        return data[self.data_begin - before :]

    def _feed_tensors(self, entries: list[Entry], data: memoryview) -> None:
        while len(data):
            if self._open is None:
                self._open = _OpenTensor(entries[self._next])
            taken = min(len(data), self._open.missing)
            self._open.feed(data[:taken])
            data = data[taken:]
            if not self._open.missing:
                self._close(self._open)
                self._close_empty(entries)

    def _close(self, tensor: _OpenTensor) -> None:
        self.tensors[tensor.entry.name] = tensor.result()
        self._open = None
        self._next += 1

    def _close_empty(self, entries: list[Entry]) -> None:
        while self._next < len(entries) and not entries[self._next].size:
            self._close(_OpenTensor(entries[self._next]))


class _OpenTensor:
    """A tensor in passing."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.missing = entry.size
        self._dtype: Dtype = DTYPES[entry.dtype]
        self._hash = xxhash.xxh3_128()
        self._finite = True
        self._torn = b""

    def feed(self, data: memoryview) -> None:
        self.missing -= len(data)
        self._hash.update(data)
        if not self._finite or not self._dtype.non_finite:
            return
        if self._torn:  # an element was cut by the end of the last chunk
            data = memoryview(self._torn + bytes(data))
        whole = len(data) - len(data) % self._dtype.size
        self._torn = bytes(data[whole:])
        self._finite = all_finite(data[:whole], self._dtype)

    def result(self) -> ScannedTensor:
        return ScannedTensor(self.entry, self._hash.hexdigest(), self._finite)
