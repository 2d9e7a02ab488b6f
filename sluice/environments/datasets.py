"""Reads the rows of data sets, for environments and for offline training.

A data set is a file, a directory, a directory saved by the package `datasets`, or a hub id. Rows are read one after the other, so that a
data set may be larger than memory. Each row comes with its place, for messages. Files are read by the standard library and pyarrow. The
package `datasets`, which takes seconds and 200 MiB to import, is only needed for directories that it saved, and for the hub.
"""

from __future__ import annotations

import contextlib
import csv
import datetime as dt
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeAlias
from uuid import UUID

from sluice.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

Row: TypeAlias = Mapping[str, Any]

_ROWS_AT_ONCE = 256
"""Number of rows of Arrow data to convert to Python objects at once: enough to be fast, few enough for rows of megabytes."""

_LONGEST_FIELD = (1 << 31) - 1
"""Maximum number of characters of a field of a CSV file. The default of the standard library is 131,072."""


class Place(NamedTuple):
    """Place of a row, for messages: ``line 3 of train.jsonl``, ``row 3 of train.parquet``. Lines count from 1, rows from 0."""

    source: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        """Return the place as a phrase."""
        return f"{self.unit} {self.number} of {self.source}"


Placed: TypeAlias = tuple[Place, Row]


def rows(dataset: str, split: str, name: str | None = None) -> Iterator[Row]:
    """Return the rows of a split; see `placed_rows`."""
    return (row for _, row in placed_rows(dataset, split, name))


def placed_rows(dataset: str, split: str, name: str | None = None) -> Iterator[Placed]:
    """Return the rows of a split, one after the other, each with its place.

    Values are plain Python: dates and times become ISO 8601 texts, and decimals become numbers. Arrow adds a null to a struct if another row
    has the field; these nulls are left out. A column that is null stays null.

    Args:
        dataset: A file, which is used for every split: ``.jsonl``, ``.ndjson``, ``.json`` or ``.csv``, each also with ``.gz``,
            ``.parquet`` or ``.arrow``; a directory with one file per split, or files of a split with names that begin with it
            (``train-00000-of-00002.parquet``), also below ``data`` or `name`; a directory that `save_to_disk` of the package `datasets`
            wrote; or a hub id, also with a revision, as ``owner/name@revision``.
        split: Such as ``train``. If the data set has no split ``eval``, its ``test`` or ``validation`` is used instead.
        name: Configuration of a hub data set.

    Raises:
        ConfigError: if the data set cannot be read, with file, line and column if known.
    """
    path = Path(dataset)
    if path.is_dir():
        if any((path / mark).exists() for mark in ("dataset_info.json", "dataset_dict.json", "state.json")):
            return _saved(path, split)
        return _directory(path, split, name)
    if kind(path) is not None or path.exists():
        return _file(path)
    return _hub(dataset, split, name)


# Mixtures.


class Part(NamedTuple):
    """One of several data sets. `share` is its share of the mixture; None if all rows are taken."""

    dataset: str
    share: Fraction | None


_SHARE = re.compile(r"(?P<dataset>.+)=(?P<share>\d+(\.\d*)?|\.\d+)")


def parts(data: str | Sequence[str]) -> list[Part]:
    """Read a setting that names a data set, or several with or without shares (``a.jsonl=0.7``).

    Raises:
        ConfigError: if only some have a share, or a share is 0.
    """
    if isinstance(data, str):
        return [Part(data, None)]
    found = [_part(each) for each in data]
    if len({each.share is None for each in found}) > 1:
        bare = next(each.dataset for each in found if each.share is None)
        raise ConfigError(
            f"{bare} has no share, and other data sets have one: give each a share, as {bare}=0.5, or none"
        )
    return found


def _part(text: str) -> Part:
    matched = _SHARE.fullmatch(text)
    if matched is None or Path(text).exists():
        return Part(text, None)
    share = Fraction(matched["share"])
    if not share:
        raise ConfigError(f"{text}: a share of 0 takes no row: raise it, or leave the data set out")
    return Part(matched["dataset"], share)


def mixed_rows(data: str | Sequence[str], split: str) -> Iterator[Placed]:
    """Yield the rows of the data sets that a setting names (`parts`), each with its place.

    Without shares, the data sets come one after the other. With shares, after any number of rows, the rows of each data set differ from its
    share by less than one row, and the same settings give the same order. The mixture ends when the data set whose turn it is has no row
    left: no row comes twice, and the remaining rows of the other data sets are not used.

    Raises:
        ConfigError: if a data set cannot be read, or has no row.
    """
    found = parts(data)
    readers = [_not_empty(each.dataset, split) for each in found]
    if found[0].share is None:
        for reader in readers:
            yield from reader
        return
    common = lcm(*(each.share.denominator for each in found if each.share))
    weights = [int(each.share * common) if each.share else 0 for each in found]
    total, turn = sum(weights), lcm(*weights)
    taken = [0] * len(found)
    for count in itertools.count(1):
        # Among data sets with less than their share of `count` rows, take the one whose next row is due first (Tijdeman, 1980).
        behind = [index for index, weight in enumerate(weights) if taken[index] * total < weight * count]
        due = min(behind, key=lambda index: (taken[index] + 1) * (turn // weights[index]))
        taken[due] += 1
        placed = next(readers[due], None)
        if placed is None:
            return
        yield placed


def _not_empty(dataset: str, split: str) -> Iterator[Placed]:
    placed = None
    for placed in placed_rows(dataset, split):
        yield placed
    if placed is None:
        raise ConfigError(f"{dataset} is empty: give a file with one JSON object per line, or a dataset with rows")


# Files.


def kind(path: Path) -> str | None:
    """Return the ending that determines how a file is read, such as ``.jsonl`` for ``a.JSONL.gz``; None for other kinds of files."""
    endings = [each.lower() for each in path.suffixes[-2:]]
    if endings[-1:] == [_COMPRESSED]:
        ending = "".join(endings[:-1])
        return ending if ending in _TEXTS else None
    ending = "".join(endings[-1:])
    return ending if ending in _READERS else None


def _file(path: Path) -> Iterator[Placed]:
    if not path.is_file():
        raise ConfigError(f"cannot read {path}: there is no such file (relative paths start at {Path.cwd()})")
    found = kind(path)
    if found is None:
        raise ConfigError(
            f"cannot read {path}: its name ends with none of {', '.join(_READERS)}, nor with {_COMPRESSED} after one of {', '.join(_TEXTS)}"
        )
    return _READERS[found](path)


def _open(path: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.open(path) if path.suffix.lower() == _COMPRESSED else path.open("rb")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, without a byte order mark. Only line feeds end lines."""
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _jsonl(path: Path) -> Iterator[Placed]:
    """Yield the objects of a JSONL file. Characters that end lines elsewhere, such as U+2028, are text here."""
    for number, line in _lines(path):
        if not line.strip():
            continue
        place = Place(str(path), number)
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{place} is not JSON: {_json_error(error)}; put one JSON object on each line (JSONL)"
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(f"{place} is not a JSON object: put one object on each line (JSONL)")
        yield place, row


def _json_error(error: Exception) -> str:
    """Return what is wrong with a JSON text, and in which column, counted from 1."""
    match error:
        case json.JSONDecodeError():
            return f"{error.msg} at column {error.colno}"
        case UnicodeDecodeError():
            return f"{error} (column {len(error.object[: error.start].decode(errors='replace')) + 1})"
    return str(error)


_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


class _Text:
    """A JSON text that is read value by value. The whole text is in memory, but only one value at a time."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text
        self._at, self._counted, self._line = 0, 0, 1
        self.skip()

    def skip(self, mark: str = "") -> bool:
        """Skip spaces, then a mark and spaces. Return whether the mark was there."""
        self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if not mark or not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        self.skip()
        return True

    def ended(self) -> bool:
        """Return whether nothing is left."""
        return self._at == len(self._text)

    @property
    def place(self) -> Place:
        """Where the next value begins."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return Place(str(self._path), self._line)

    def value(self) -> Any:  # noqa: ANN401 - whatever is there
        """Return the next value."""
        try:
            value, self._at = _DECODER.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            raise ConfigError(f"line {error.lineno} of {self._path} is not JSON: {_json_error(error)}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.place} is not JSON: {error}") from error
        self.skip()
        return value

    def fail(self, wanted: str) -> ConfigError:
        """Return the error for a text that lacks `wanted` here."""
        column = self._at - self._text.rfind("\n", 0, self._at)
        return ConfigError(f"{self.place} is not JSON: expecting {wanted} at column {column}")


def _json(path: Path) -> Iterator[Placed]:
    """Yield the objects of a JSON file: from its list, from the only list of objects in its object, or one after the other.

    An object with a list of messages (objects with a role) is a row, not a list of rows.
    """
    text = _Text(path, "".join(_decoded(path, *each) for each in _lines(path)))
    if text.skip("["):
        yield from _listed(text)
        return
    if text.ended():
        return
    place, first = text.place, text.value()
    if text.ended() and (within := _list_within(first)) is not None:
        yield from ((Place(f"{path}, {within}", index, "row"), each) for index, each in enumerate(first[within]))
        return
    yield place, _object(place, first)
    while not text.ended():
        place = text.place
        yield place, _object(place, text.value())


def _listed(text: _Text) -> Iterator[Placed]:
    """Yield the objects of a list. The text is just after its opening bracket."""
    more = not text.skip("]")
    while more:
        place = text.place
        yield place, _object(place, text.value())
        more = text.skip(",")
        if not more and not text.skip("]"):
            raise text.fail("a comma or the end of the list")
    if not text.ended():
        raise text.fail("the end of the file after the list")


def _object(place: Place, value: Any) -> Row:  # noqa: ANN401 - whatever was read
    if not isinstance(value, dict):
        raise ConfigError(
            f"{place} has a value that is not an object, but {value!r:.80}: give a list of objects, or one object per line"
        )
    return value


_OF_A_ROW = {"messages", "prompt", "question"}
"""An object with one of these fields is a row, even if it has a list, such as a list of tools."""


def _list_within(value: Any) -> str | None:  # noqa: ANN401 - whatever was read
    """Return the name of the only field of an object that is a list of rows."""
    lists = [
        name
        for name, each in (value.items() if isinstance(value, dict) and not value.keys() & _OF_A_ROW else ())
        if isinstance(each, list) and each and all(isinstance(row, dict) and "role" not in row for row in each)
    ]
    return lists[0] if len(lists) == 1 else None


def _csv(path: Path) -> Iterator[Placed]:
    """Yield the records of a CSV file, with the names from its first record. All values are texts; a record may span lines."""
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader((_decoded(path, *each) for each in _lines(path)), strict=True)
    header: list[str] = []
    while True:
        place = Place(str(path), reader.line_num + 1)
        try:
            record = next(reader, None)
        except csv.Error as error:
            raise ConfigError(
                f"{place} is not CSV: {error}; put texts with commas, quotes or line ends in quotes"
            ) from error
        if record is None:
            return
        if not record:
            continue
        if not header:
            header = record
            if twice := [name for name in header if header.count(name) > 1 or not name]:
                raise ConfigError(
                    f"{place} names the columns, and {twice[0]!r} is empty or there twice: correct the names"
                )
        elif len(record) != len(header):
            raise ConfigError(
                f"{place} has {len(record)} columns, and the first line names {len(header)} ({', '.join(header)}): correct the line, and"
                " put texts with commas in quotes"
            )
        else:
            yield place, dict(zip(header, record, strict=True))


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"line {number} of {path} is not text: {_json_error(error)}; save the file as UTF-8"
        ) from error


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow as pa  # noqa: PLC0415 - slow to import
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # noqa: PLC0415

    try:
        with pq.ParquetFile(path) as file:
            yield from _placed(path, file.iter_batches(_ROWS_AT_ONCE))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _arrow(path: Path) -> Iterator[Placed]:
    """Yield the rows of an Arrow file, in the file format or the stream format. The file is mapped, not loaded."""
    import pyarrow as pa  # noqa: PLC0415 - slow to import

    try:
        with pa.memory_map(str(path)) as file:
            try:
                whole = pa.ipc.open_file(file)
                batches: Iterable[Any] = (whole.get_batch(index) for index in range(whole.num_record_batches))
            except pa.ArrowInvalid:
                batches = pa.ipc.open_stream(file)
            yield from _placed(path, batches)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _placed(path: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[Placed]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            for row in batch.slice(start, _ROWS_AT_ONCE).to_pylist(maps_as_pydicts="lossy"):
                yield Place(str(path), number, "row"), _of_arrow(row)
                number += 1


_COMPRESSED = ".gz"

_READERS: Mapping[str, Callable[[Path], Iterator[Placed]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}

ENDINGS = tuple(_READERS)
"""Endings of the names of files that can be read."""

_USUAL = (".jsonl", ".parquet")
"""Kinds of files that are preferred in a directory. Files of other kinds for the same split are copies of them or notes."""

_TEXTS = (".jsonl", ".ndjson", ".json", ".csv")
"""Files that may be compressed."""


# Values of Arrow.


def _of_arrow(row: Row) -> Row:
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:  # noqa: ANN401, PLR0911 - whatever a row has; one line per type
    """Return a value of Arrow as plain Python, without the nulls that Arrow adds so that a struct has every field of any row.

    If the content of a message is null, it stays null.
    """
    match value:
        case None | str() | bool() | int() | float():
            return value
        case Mapping():
            is_message = "role" in value
            return {
                name: _plain(each)
                for name, each in value.items()
                if each is not None or (is_message and name == "content")
            }
        case list() | tuple():
            return [_plain(each) for each in value]
        case Decimal():
            return _number(value)
        case dt.datetime() | dt.date() | dt.time():
            return value.isoformat()
        case dt.timedelta():
            return value.total_seconds()
        case UUID():
            return str(value)
    return value


def _number(value: Decimal) -> int | float | str:
    """Return a decimal as a number, or as a text if no Python number has exactly its value."""
    if not value.is_finite():
        return float(value)
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


# Directories and the hub.


def _names(split: str) -> tuple[str, ...]:
    return ("eval", "test", "validation") if split == "eval" else (split,)


def _files(path: Path, split: str, name: str | None) -> list[Path]:
    """Return the files of a split in a directory, all of one kind; empty if it has no such split.

    Raises:
        ConfigError: if there are files of several kinds: they may be copies of each other.
    """
    folders = [path / name, path, path / "data"] if name else [path, path / "data"]
    for wanted in _names(split):
        for folder in folders:
            found = [
                each
                for each in sorted(folder.glob(f"{wanted}*"))
                if each.is_file()
                and kind(each) is not None
                and (each.name.startswith(f"{wanted}-") or each.name in _exact(wanted))
            ]
            if usual := [each for each in found if kind(each) in _USUAL and each.suffix.lower() != _COMPRESSED]:
                return usual
            if len({kind(each) for each in found}) > 1:
                raise ConfigError(
                    f"{folder} has the split {wanted!r} in files of several kinds ({', '.join(each.name for each in found)}): name one of them"
                )
            if found:
                return found
    return []


def _exact(split: str) -> set[str]:
    """Return the names that a split's file may have if the split is a single file."""
    return {split + ending for ending in _READERS} | {split + ending + _COMPRESSED for ending in _TEXTS}


def _directory(path: Path, split: str, name: str | None) -> Iterator[Placed]:
    """Return the rows of the files of a split. If no file is named after the split, return the rows that the package `datasets` finds."""
    if found := _files(path, split, name):
        return (placed for each in found for placed in _file(each))
    if any(kind(each) is not None and each.is_file() for each in path.rglob("*")):
        with contextlib.suppress(ConfigError):  # the message below says more
            return _loaded(str(path), split, name, None)
    there = ", ".join(sorted(each.name for each in path.iterdir())) or "nothing"
    raise ConfigError(
        f"{path} has no split {split!r}: it needs a file such as {_names(split)[0]}.jsonl or {_names(split)[0]}.parquet; there is {there}"
    )


def _saved(path: Path, split: str) -> Iterator[Placed]:
    from datasets import DatasetDict, load_from_disk  # noqa: PLC0415 - slow to import

    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load data set {path}: {error}") from error
    if not isinstance(found, DatasetDict):
        return _numbered(str(path), found)
    for name in _names(split):
        if name in found:
            return _numbered(f"{path}, split {name}", found[name])
    raise ConfigError(f"data set {path} has no split {split!r}; it has {', '.join(found)}")


def _numbered(source: str, found: Iterable[Row]) -> Iterator[Placed]:
    return ((Place(source, number, "row"), _of_arrow(row)) for number, row in enumerate(found))


def _hub(dataset: str, split: str, name: str | None) -> Iterator[Placed]:
    """Return the rows of a data set of the hub. Offline, read the revision's copy in the hub's cache."""
    from huggingface_hub import constants, snapshot_download  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    from sluice.models import check_hub_dataset  # noqa: PLC0415 - environments that use no hub need none of it

    repository, _, revision = dataset.partition("@")
    if constants.is_offline_mode():
        try:
            copy = Path(
                snapshot_download(repository, repo_type="dataset", revision=revision or None, local_files_only=True)
            )
        except (LocalEntryNotFoundError, FileNotFoundError) as error:
            if revision:
                raise ConfigError(
                    f"revision {revision} of the data set {repository} is not in the cache, and HF_HUB_OFFLINE is set: unset it, or"
                    f" download it with `hf download {repository} --repo-type dataset --revision {revision}`"
                ) from error
        except HFValidationError:
            pass  # said below
        else:
            missing = _missing(_files(copy, split, name))
            if revision and missing:
                raise ConfigError(
                    f"{copy} lacks {missing} files of split {split}, and HF_HUB_OFFLINE is set: unset it, or download the rest with"
                    f" `hf download {repository} --repo-type dataset --revision {revision}`"
                )
            if revision or missing == 0:
                return _loaded(str(copy), split, name, None)  # using the configurations in its README, as online
    check_hub_dataset(repository, "dataset")
    return _loaded(repository, split, name, revision or None)


def _missing(files: Sequence[Path]) -> int | None:
    """Return how many files of a split are missing in a download, judging by their names (``-00001-of-00002``); None if all are missing."""
    counts = [int(found[1]) for each in files if (found := re.search(r"-of-(\d+)", each.name))]
    return max(0, max(counts, default=0) - len(counts)) if files else None


def _loaded(dataset: str, split: str, name: str | None, revision: str | None) -> Iterator[Placed]:
    """Return the rows that the package `datasets` loads: from the hub, or from a directory whose files are named by other rules."""
    from datasets import load_dataset  # noqa: PLC0415 - slow to import
    from datasets.exceptions import DatasetsError  # noqa: PLC0415

    problem: Exception | None = None
    for each in _names(split):
        try:
            loaded = load_dataset(dataset, name, split=each, revision=revision)
        except (OSError, ValueError, DatasetsError) as error:
            problem = problem or error
        else:
            return _numbered(f"{dataset}, split {each}", loaded)
    at = f" of revision {revision!r}" if revision else ""
    raise ConfigError(f"cannot load data set {dataset!r}, split {split!r}{at}: {problem}") from problem
