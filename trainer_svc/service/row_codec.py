"""Encode training rows for the other ranks: a safetensors file with one tensor per column, all rows end to end.

Fields that are not tensors (ids, temperature, reward, version spans) are JSON in the file's metadata.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import fields
from typing import Any

import torch
from safetensors.torch import load, save

from sluice.versions import Version, VersionSpan
from trainer_svc.batch.rows import Sequence

__all__ = ["decode_rows", "encode_rows"]

ROWS = "rows"
"""Metadata key of the fields that are not tensors."""

HOLDERS = "rows."
"""Prefix of the tensor that says which rows have a column, if not all do."""


def encode_rows(rows: Rows[Sequence]) -> bytes:
    """Encode rows.

    Raises:
        ValueError: if a column has different dtypes in different rows.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain: list[dict[str, Any]] = [{"tokens": len(row)} for row in rows]
    for name in (field.name for field in fields(Sequence)):
        values = [getattr(row, name) for row in rows]
        holders = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        if not holders:
            for row, value in zip(plain, values, strict=True):
                row[name] = _spans_out(value) if name == "versions" else value
            continue
        if len({values[place].dtype for place in holders}) > 1:
            raise ValueError(f"column {name} has several dtypes: give all rows the same")
        tensors[name] = torch.cat([values[place] for place in holders])
        if len(holders) < len(rows):
            tensors[HOLDERS + name] = torch.tensor(holders)
    data: bytes = save(tensors, metadata={ROWS: json.dumps(plain)})
    return data


def decode_rows(data: bytes) -> list[Sequence]:
    """Decode what `encode_rows` returned.

    Raises:
        ValueError: if the bytes are not encoded rows.
    """
    plain = _plain(data)
    lengths = [row.pop("tokens") for row in plain]
    tensors = load(data)
    for name, column in _columns(tensors):
        holders = tensors[HOLDERS + name].tolist() if HOLDERS + name in tensors else range(len(plain))
        parts = column.split([lengths[place] for place in holders])
        for place, part in zip(holders, parts, strict=True):
            plain[place][name] = part
    for row in plain:
        row["versions"] = _spans_in(row["versions"])
    return [Sequence(**row) for row in plain]


def _columns(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, column) for name, column in tensors.items() if not name.startswith(HOLDERS))


def _plain(data: bytes) -> list[dict[str, Any]]:
    """Return the JSON in a safetensors header, which the library reads from paths only."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        rows = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][ROWS])
    except (struct.error, ValueError, KeyError) as error:
        raise ValueError(f"these bytes are not encoded rows: {error}") from error
    if not isinstance(rows, list):
        raise TypeError("these bytes are not encoded rows")
    return rows


def _spans_out(spans: tuple[VersionSpan, ...]) -> list[tuple[int, int, int]]:
    return [(span.start, span.version.epoch, span.version.number) for span in spans]


def _spans_in(spans: list[tuple[int, int, int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(start, Version(epoch, number)) for start, epoch, number in spans)
