"""The header of a safetensors file: where each tensor's bytes lie.

Format: https://huggingface.co/docs/safetensors#format. The library reads whole files; a stream needs the header alone, as
soon as its bytes are there, and a file under assembly needs it before the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync.format.dtypes import DTYPES
from weightsync.format.names import BadNameError, check_tensor

__all__ = [
    "HEADER_LENGTH_BYTES",
    "MAX_HEADER_BYTES",
    "Entry",
    "LayoutError",
    "parse_header",
    "place",
    "render_header",
]

HEADER_LENGTH_BYTES = 8
"""A file begins with its header's length, little-endian."""

MAX_HEADER_BYTES = 64 << 20
"""Longest header that is read; half a million tensors fit. The library's own bound is 100 MB."""

_METADATA = "__metadata__"


class LayoutError(ValueError):
    """The header is no valid safetensors header."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    Attributes:
        name: Its name in the file.
        dtype: Data type as safetensors names it.
        shape: Extent per dimension.
        begin: First byte, counted from the end of the header.
        end: Byte after the last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
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
    """Write the header, its length in front.

    Args:
        entries: The tensors.
        metadata: Free facts of the file.
        length: Bytes that the result must have, filled with blanks; None: up to the next multiple of 8, which keeps the data aligned.

    Raises:
        LayoutError: if it does not fit into ``length``.
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
