"""Safetensors files: data types, the header, which says where each tensor's bytes lie, and a check of arriving bytes.

Format: https://huggingface.co/docs/safetensors#format. The library reads whole files; a stream needs the header alone, as
soon as its bytes are there, and a file that is being written needs it before the data.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

HEADER_LENGTH_BYTES = 8
"""Bytes of the header's length, a little-endian number with which a file begins."""

_MAX_HEADER_BYTES = 64 << 20
"""Longest header that is read; half a million tensors fit. The library's own bound is 100 MB."""

_METADATA = "__metadata__"
_TENSOR_NAME = re.compile(r"[!-~]{1,512}")

_BLOCK_BYTES = 256 << 10
"""Elements are tested in blocks of this many bytes, so that the masked copy stays in the second-level cache."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """One data type; `size` is in bytes.

    `non_finite` are the bits that are all set in NaN and infinity, and in no finite value; 0 where every pattern is finite.
    """

    name: str
    size: int
    non_finite: int = 0


DTYPES: dict[str, Dtype] = {
    each.name: each
    for each in (
        Dtype("BOOL", 1),
        Dtype("U8", 1),
        Dtype("I8", 1),
        Dtype("F8_E4M3", 1, 0x7F),  # has NaN but no infinity, OFP8 specification
        Dtype("F8_E5M2", 1, 0x7C),
        Dtype("I16", 2),
        Dtype("U16", 2),
        Dtype("F16", 2, 0x7C00),
        Dtype("BF16", 2, 0x7F80),
        Dtype("I32", 4),
        Dtype("U32", 4),
        Dtype("F32", 4, 0x7F80_0000),
        Dtype("I64", 8),
        Dtype("U64", 8),
        Dtype("F64", 8, 0x7FF0_0000_0000_0000),
    )
}
"""Every data type that a shard may hold, by name."""

_PATTERNS: dict[int, type[np.uint8 | np.uint16 | np.uint32 | np.uint64]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}


class BadNameError(ValueError):
    """A name that is not allowed; the message says which are."""


class LayoutError(ValueError):
    """The header is no valid safetensors header."""


def check_tensor(name: str) -> str:
    """Check a tensor's name and return it.

    Raises:
        BadNameError: if it contains blanks, which separate fields in a version's digest, or unprintable characters, or has
            another meaning in a safetensors file.
    """
    if name == _METADATA:
        raise BadNameError(f"{name} is no tensor name: safetensors keeps it for itself")
    if not _TENSOR_NAME.fullmatch(name):
        raise BadNameError(
            f"{name[:80]!r} is not a tensor name; allowed are 1 to 512 printable ASCII characters without blanks"
        )
    return name


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: bytes `begin` to before `end`, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Return the bytes of the tensor."""
        return self.end - self.begin


def place(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[Entry]:
    """Lay tensors (name, dtype, shape) one behind the other, in the given order."""
    entries, position = [], 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * DTYPES[dtype].size
        entries.append(Entry(name, dtype, shape, position, position + size))
        position += size
    return entries


def render_header(
    entries: Sequence[Entry], metadata: Mapping[str, str] | None = None, length: int | None = None
) -> bytes:
    """Write the header, preceded by its length.

    Pad it with blanks to `length` bytes; None: to the next multiple of 8, which keeps the data aligned.

    Raises:
        LayoutError: if the header does not fit into `length` bytes.
    """
    table: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    for entry in entries:
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    needed = HEADER_LENGTH_BYTES + len(text)
    total = -(-needed // 8) * 8 if length is None else length
    if needed > total:
        raise LayoutError(f"a header of {needed} bytes does not fit into {total}")
    return (total - HEADER_LENGTH_BYTES).to_bytes(HEADER_LENGTH_BYTES, "little") + text.ljust(
        total - HEADER_LENGTH_BYTES
    )


def parse_header(text: bytes | memoryview) -> list[Entry]:
    """Read a header without its length, in order of position.

    Raises:
        LayoutError: if it is not JSON of the right form, or the tensors leave holes, overlap, or have another size than
            their shape says.
    """
    try:
        table = json.loads(bytes(text))
        table.pop(_METADATA, None)
        entries = [_entry(name, row) for name, row in table.items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LayoutError(f"not a safetensors header: {error}; write the shard with safetensors") from error
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise LayoutError(
                f"tensor {entry.name} begins at byte {entry.begin}, expected {position}: no holes, no overlap"
            )
        position = entry.end
    return entries


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where the tensors of a file of `size` bytes lie, by name. Positions count from `data_begin`, the end of the header."""

    data_begin: int
    entries: Mapping[str, Entry]
    size: int


def header_end(start: bytes | memoryview, size: int) -> int:
    """Return the offset of the data in a file of `size` bytes whose first bytes are `start`. Raise LayoutError if it is beyond the end."""
    end = HEADER_LENGTH_BYTES + int.from_bytes(start, "little")
    if end > min(size, HEADER_LENGTH_BYTES + _MAX_HEADER_BYTES):
        raise LayoutError(f"a header of {end} bytes in a file of {size}: not a safetensors file, or cut off")
    return end


def parse_layout(head: bytes | memoryview, size: int) -> FileLayout:
    """Return the layout of a file of `size` bytes whose first bytes, up to its `header_end`, are `head`.

    Raises:
        LayoutError: if header and tensors do not fill the file.
    """
    entries = parse_header(head[HEADER_LENGTH_BYTES:])
    end = len(head) + (entries[-1].end if entries else 0)
    if end != size:
        raise LayoutError(f"header and tensors make {end} bytes, the file has {size}")
    return FileLayout(len(head), {entry.name: entry for entry in entries}, size)


def read_layout(descriptor: int) -> FileLayout:
    """Read the header of an open safetensors file; raise LayoutError if the file is not one, or is truncated."""
    size = os.fstat(descriptor).st_size
    end = header_end(os.pread(descriptor, HEADER_LENGTH_BYTES, 0), size)
    return parse_layout(os.pread(descriptor, end, 0), size)


def _entry(name: str, row: Mapping[str, Any]) -> Entry:
    try:
        check_tensor(name)
    except BadNameError as error:
        raise LayoutError(str(error)) from error
    begin, end = row["data_offsets"]
    shape = tuple(row["shape"])
    numbers = (begin, end, *shape)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise LayoutError(f"tensor {name} has a size or position that is no natural number")
    if row["dtype"] not in DTYPES:
        raise LayoutError(f"tensor {name} has data type {row['dtype']!r}; known are {', '.join(DTYPES)}")
    if end - begin != math.prod(shape) * DTYPES[row["dtype"]].size:
        raise LayoutError(
            f"tensor {name} of shape {list(shape)} and type {row['dtype']} cannot have {end - begin} bytes"
        )
    return Entry(name, row["dtype"], shape, begin, end)


@dataclass(frozen=True, slots=True)
class ScannedTensor:
    """A tensor whose bytes have all passed: their xxh3-128, hexadecimal, and whether no element is NaN or infinite."""

    entry: Entry
    digest: str
    finite: bool


class Scan:
    """Consumes a file of `size` bytes in order. The pieces may be cut anywhere."""

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
        """Return whether every byte has passed."""
        return self.position == self.size

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes; raise LayoutError if they are not those of a safetensors file of the announced size."""
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
        """Collect header bytes; return the bytes after the header."""
        before = len(self._head)
        self._head += data
        if len(self._head) < HEADER_LENGTH_BYTES:
            return data[len(data) :]
        self.data_begin = header_end(bytes(self._head[:HEADER_LENGTH_BYTES]), self.size)
        if len(self._head) < self.data_begin:
            return data[len(data) :]
        self.entries = list(parse_layout(bytes(self._head[: self.data_begin]), self.size).entries.values())
        self._head = bytearray()
        self._close_empty(self.entries)
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
    """A tensor of which some bytes have passed."""

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


def all_finite(data: bytes | memoryview, dtype: Dtype) -> bool:
    """Return whether no element is NaN or infinite. The data are whole little-endian elements.

    Works on bit patterns, so that no type needs arithmetic: about 7 GB/s per core.
    """
    if not dtype.non_finite or not len(data):
        return True
    pattern = _PATTERNS[dtype.size]
    mask = pattern(dtype.non_finite)
    values = np.frombuffer(data, dtype=pattern)
    block = _BLOCK_BYTES // dtype.size
    masked = np.empty(min(block, values.size), dtype=pattern)
    for start in range(0, values.size, block):
        part = values[start : start + block]
        if np.bitwise_and(part, mask, out=masked[: part.size]).max() == mask:
            return False
    return True
