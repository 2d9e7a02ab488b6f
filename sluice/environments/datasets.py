"""Reads the rows of a data set: JSONL and Parquet files, directories of them, data sets of Hugging Face on disk or on the hub.

Files are read by the standard library and pyarrow. The package `datasets`, which takes seconds and 200 MiB to import, is needed for its
own directories and for the hub alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sluice.errors import ConfigError

Row = Mapping[str, Any]


def rows(dataset: str, split: str, name: str | None = None) -> Iterable[Row]:
    """Return the rows of a split.

    Args:
        dataset: A ``.jsonl`` or ``.parquet`` file, which is all of its splits; a directory with one file per split, or files of a
            split with names that begin with it (``train-00000-of-00002.parquet``), also below ``data``; a directory that
            `save_to_disk` of the package `datasets` wrote; or a hub id.
        split: Such as ``train``. Where the data set has none called ``eval``, its ``test`` or ``validation`` takes that place.
        name: Configuration of a hub data set.

    Raises:
        ConfigError: if the data set cannot be read.
    """
    path = Path(dataset)
    if path.is_dir():
        if any((path / mark).exists() for mark in ("dataset_info.json", "dataset_dict.json", "state.json")):
            return _saved(path, split)
        return _directory(path, split)
    if path.suffix in _READERS or path.exists():
        return _file(path)
    return _hub(dataset, split, name)


def _names(split: str) -> tuple[str, ...]:
    return ("eval", "test", "validation") if split == "eval" else (split,)


def place(dataset: str, split: str, index: int) -> str:
    """Return where a row of `rows` is, for messages: file and line of JSONL, file and row of other files; rows count from 0."""
    path = Path(dataset)
    before = 0
    for file in [path] if path.is_file() else _files(path, split):
        for number, _ in jsonl_rows(file) if file.suffix == ".jsonl" else enumerate(_file(file)):
            if before == index:
                return f"line {number} of {file}" if file.suffix == ".jsonl" else f"row {number} of {file}"
            before += 1
    return f"row {index} of {dataset}"


def _files(path: Path, split: str) -> list[Path]:
    """Return the files of a split in a directory; none if it has no such split."""
    for name in _names(split):
        for folder in (path, path / "data"):
            found = [
                each for suffix in _READERS for each in (folder / f"{name}{suffix}", *folder.glob(f"{name}-*{suffix}"))
            ]
            if found := sorted(each for each in found if each.is_file()):
                return found
    return []


def _directory(path: Path, split: str) -> Iterator[Row]:
    """Yield the rows of the files of a split."""
    if not (found := _files(path, split)):
        there = ", ".join(sorted(each.name for each in path.iterdir())) or "nothing"
        raise ConfigError(
            f"{path} has no split {split!r}: it needs a file such as {_names(split)[0]}.jsonl or {_names(split)[0]}.parquet; there is {there}"
        )
    for each in found:
        yield from _file(each)


def _file(path: Path) -> Iterable[Row]:
    if not path.is_file():
        raise ConfigError(f"cannot read {path}: there is no such file (relative paths start at {Path.cwd()})")
    if path.suffix not in _READERS:
        raise ConfigError(f"cannot read {path}: it is neither {' nor '.join(_READERS)}")
    return _READERS[path.suffix](path)


def _jsonl(path: Path) -> Iterator[Row]:
    return (row for _, row in jsonl_rows(path))


def jsonl_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a JSONL file with the numbers of their lines, from 1.

    Lines end at line feeds alone: other characters that end lines elsewhere, such as U+2028, are text.

    Raises:
        ConfigError: with the line if it is not a JSON object.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except ValueError as error:
                    raise ConfigError(
                        f"line {number} of {path} is not JSON: {error}; put one JSON object on each line (JSONL)"
                    ) from error
                if not isinstance(row, dict):
                    raise ConfigError(
                        f"line {number} of {path} is not a JSON object: put one object on each line (JSONL)"
                    )
                yield number, row
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415 - slow to import
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # noqa: PLC0415

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


_READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {".jsonl": _jsonl, ".parquet": _parquet}


def _saved(path: Path, split: str) -> Iterable[Row]:
    from datasets import DatasetDict, load_from_disk  # noqa: PLC0415 - slow to import

    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load data set {path}: {error}") from error
    if not isinstance(found, DatasetDict):
        whole: Iterable[Row] = found
        return whole
    for name in _names(split):
        if name in found:
            part: Iterable[Row] = found[name]
            return part
    raise ConfigError(f"data set {path} has no split {split!r}; it has {', '.join(found)}")


def _hub(dataset: str, split: str, name: str | None) -> Iterable[Row]:
    from datasets import load_dataset  # noqa: PLC0415 - slow to import

    problem: Exception | None = None
    for each in _names(split):
        try:
            loaded: Iterable[Row] = load_dataset(dataset, name, split=each)
        except (OSError, ValueError) as error:
            problem = problem or error
        else:
            return loaded
    raise ConfigError(f"cannot load data set {dataset!r}, split {split!r}: {problem}") from problem
