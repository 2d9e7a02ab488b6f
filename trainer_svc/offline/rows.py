"""Rows of a JSONL file or a dataset, each with a name for messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from sluice.config import ConfigError, reason_of
from sluice.models import check_hub_dataset
from sluice.render import TemplateError

__all__ = ["DataError", "Row", "described", "is_file", "named", "read_rows"]

Row: TypeAlias = Mapping[str, Any]

FILES = {".jsonl", ".json", ".txt", ".csv", ".parquet"}
"""Ends of names that no hub dataset has."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""The form of a dataset's name on the hub."""


class DataError(ValueError):
    """The data cannot be read or rendered. The message names the row."""


def is_file(data: str) -> bool:
    """Return whether the data is a file, which has no splits, rather than a dataset.

    Raises:
        DataError: if it is neither a file, nor a directory, nor of the form of a hub id.
    """
    path = Path(data)
    if path.is_file():
        return True
    if not path.exists() and (path.suffix in FILES or not HUB_ID.fullmatch(data)):
        raise DataError(f"there is no file {path.resolve()}, and {data!r} is not a hub dataset id such as owner/name")
    return False


def read_rows(data: str, split: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a JSONL file, a dataset directory or a hub dataset, each with a name for messages.

    Raises:
        DataError: if there is no such file or dataset, it holds no row, or a line is not a JSON object.
    """
    name = None
    for name, row in _file_rows(data) if is_file(data) else _dataset_rows(data, split):
        yield name, row
    if name is None:
        raise DataError(f"{data} is empty: give a file with one JSON object per line, or a dataset with rows")


def _file_rows(data: str) -> Iterator[tuple[str, Row]]:
    try:
        with Path(data).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{data}:{number}", _row(line, f"{data}:{number}")
    except OSError as error:
        raise DataError(f"cannot read {data}: {error.strerror}") from error


def _row(line: bytes, name: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{name} is not JSON ({error}): put one JSON object on each line (JSONL)") from error
    if not isinstance(row, dict):
        raise DataError(f"{name} is not a JSON object: put one object on each line (JSONL)")
    return row


@contextmanager
def named(name: str) -> Iterator[None]:
    """Raise what rendering a row raises as a `DataError` that names the row.

    Raises:
        DataError: if the row is malformed.
    """
    try:
        yield
    except TemplateError as error:
        raise DataError(f"{name}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f"{name} contains malformed messages ({error!r}): give objects with role and content"
        ) from error


def described(row: Row) -> str:
    """Return the keys of a row and the types of their values, for a message."""
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items()) or "nothing"


def _dataset_rows(name: str, split: str) -> Iterator[tuple[str, Row]]:
    from datasets import load_dataset  # noqa: PLC0415  seconds of import that files do not need
    from datasets.exceptions import DatasetsError  # noqa: PLC0415

    try:
        check_hub_dataset(name)
    except ConfigError as error:
        raise DataError(str(error)) from error
    try:
        rows = load_dataset(name, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(f"cannot load split {split} of the dataset {name}: {reason_of(error)}") from error
    for number, row in enumerate(rows):
        yield f"{name}[{split}][{number}]", row
