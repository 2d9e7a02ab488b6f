"""Rows of a JSONL file or a dataset, each with a name for messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from sluice.render import TemplateError

__all__ = ["DataError", "Row", "described", "named", "read_rows"]

Row: TypeAlias = Mapping[str, Any]


class DataError(ValueError):
    """The data cannot be read or rendered; the message names the row."""


def read_rows(data: str, split: str) -> Iterator[tuple[str, Row]]:
    """Rows of a JSONL file, of a dataset directory or of a hub dataset, each with a name for messages.

    Raises:
        DataError: if there is no such file or a line is not a JSON object.
    """
    path = Path(data)
    if not path.is_file():
        if not path.exists() and (path.suffix in {".jsonl", ".json"} or path.is_absolute()):
            raise DataError(f"there is no file {data}")
        yield from _hub_rows(data, split)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{data}:{number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{data}:{number} is not a JSON object")
            yield f"{data}:{number}", row


@contextmanager
def named(name: str) -> Iterator[None]:
    """Say which row it was that could not be rendered.

    Raises:
        DataError: for what a row that is malformed in whatever way raises.
    """
    try:
        yield
    except TemplateError as error:
        raise DataError(f"{name}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f"{name} holds messages that are none: {error!r}; give objects with role and content"
        ) from error


def described(row: Row) -> str:
    """The keys of a row and what they hold, for a message."""
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items()) or "nothing"


def _hub_rows(name: str, split: str) -> Iterator[tuple[str, Row]]:
    from datasets import load_dataset  # noqa: PLC0415  seconds of import that local files do not need

    for number, row in enumerate(load_dataset(name, split=split)):
        yield f"{name}[{split}][{number}]", row
