"""Staged files that hold only some bytes of a version, as a selective pull makes them."""

from __future__ import annotations

from pathlib import Path

from weightsync.engine.coverage import Coverage
from weightsync.engine.selection import Selection, normal, scaled
from weightsync.format.dtypes import DTYPES
from weightsync.format.layout import HEADER_LENGTH_BYTES, Entry, parse_header, render_header

PAGE = 4096


def thin(source: Path, target: Path, selection: Selection) -> Path:
    """Copy the selected ranges of a safetensors file into one of the same layout with holes."""
    data = source.read_bytes()
    begin = HEADER_LENGTH_BYTES + int.from_bytes(data[:HEADER_LENGTH_BYTES], "little")
    entries = parse_header(data[HEADER_LENGTH_BYTES:begin])
    partial = {
        entry.name: selection[entry.name]
        for entry in entries
        if entry.name in selection and scaled(normal(selection[entry.name]), size_of(entry)) != ((0, entry.size),)
    }
    metadata = {"format": "pt"} | Coverage(partial).metadata()
    length = -(-len(render_header(entries, metadata)) // PAGE) * PAGE
    with target.open("wb") as file:
        file.write(render_header(entries, metadata, length))
        file.truncate(length + len(data) - begin)
        for entry in entries:
            whole = ((0, entry.size // size_of(entry)),)
            for first, last in scaled(selection.get(entry.name, whole), size_of(entry)):
                file.seek(length + entry.begin + first)
                file.write(data[begin + entry.begin + first : begin + entry.begin + last])
    return target


def size_of(entry: Entry) -> int:
    return DTYPES[entry.dtype].size


def occupied(path: Path) -> int:
    """Bytes that a file takes up, holes not counted."""
    return path.stat().st_blocks * 512
