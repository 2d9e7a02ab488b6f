"""Rows of data sets: every kind of file, directories of them, what the package `datasets` saved, copies of the hub, and mixtures."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.environments.datasets import mixed_rows, parts, placed_rows, rows
from sluice.errors import ConfigError

ROWS = [{"question": "2 + 2?", "answer": "#### 4"}, {"question": 'é, "so"?\nyes', "answer": "5"}]

KINDS = [
    "a.jsonl",
    "a.ndjson",
    "a.json",
    "lines.json",
    "within.json",
    "a.csv",
    "a.parquet",
    "file.arrow",
    "stream.arrow",
]
TEXTS = ["a.jsonl", "a.json", "lines.json", "a.csv"]
TYPED = [name for name in KINDS if name != "a.csv"]


def write(path: Path, found: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.removesuffix(".gz")
    match name.rpartition(".")[2]:
        case "parquet":
            pq.write_table(pa.Table.from_pylist(found), path, row_group_size=512)
        case "arrow":
            table = pa.Table.from_pylist(found)
            open_ = pa.ipc.new_stream if name.startswith("stream") else pa.ipc.new_file
            with pa.OSFile(str(path), "wb") as file, open_(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=512)
        case ending:
            content = text_of(name, ending, found).encode()
            path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def text_of(name: str, ending: str, found: Sequence[Mapping[str, Any]]) -> str:
    if ending == "csv":
        columns = list(found[0])
        quoted = [["" if row[each] is None else row[each] for each in columns] for row in found]
        return "\r\n".join(
            ",".join('"' + str(each).replace('"', '""') + '"' for each in row) for row in [columns, *quoted]
        )
    if name == "a.json":
        return json.dumps(found, ensure_ascii=False, indent=1)
    if name == "within.json":
        return json.dumps({"version": "1.0", "sizes": [1], "data": found}, ensure_ascii=False)
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in found) + "\n\n"


@pytest.mark.parametrize("name", [*KINDS, *(f"{name}.gz" for name in TEXTS), "A.JSONL"])
def test_a_file_of_every_kind_has_the_same_rows_for_all_splits(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    assert list(rows(str(path), "train")) == list(rows(str(path), "eval")) == ROWS


@pytest.mark.parametrize("name", TYPED)
def test_values_keep_their_types(tmp_path: Path, name: str) -> None:
    found = [{"n": 7, "x": 0.5, "yes": True, "parts": ["a", "b"], "object": {"a": {"b": [1, 2]}}, "none": None}]
    assert list(rows(str(write(tmp_path / name, found)), "train")) == found


def test_values_of_a_csv_file_are_texts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,x,empty\n7,0.50,\n\nnull,NaN,''\n")
    assert list(rows(str(tmp_path / "a.csv"), "train")) == [
        {"n": "7", "x": "0.50", "empty": ""},
        {"n": "null", "x": "NaN", "empty": "''"},
    ]


def test_long_fields_of_a_csv_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n" + "x" * 200_000 + "\n")
    ((row),) = rows(str(tmp_path / "a.csv"), "train")
    assert len(row["text"]) == 200_000


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_what_json_does_not_have_becomes_plain(tmp_path: Path, name: str) -> None:
    found = {
        "whole": Decimal("7.00"),
        "exact": Decimal("0.25"),
        "long": Decimal("0.1234567890123456789"),
        "day": dt.date(2026, 1, 2),
        "inside": {"time": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)},
    }
    (row,) = rows(str(write(tmp_path / name, [found])), "train")
    assert row == {
        "whole": 7,
        "exact": 0.25,
        "long": "0.1234567890123456789",
        "day": "2026-01-02",
        "inside": {"time": "2026-01-02T03:04:05+00:00"},
    }
    assert json.loads(json.dumps(row)) == row


SEPARATORS = "one\u2028two\u2029three\u0085four\x0bfive\x1csix"


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", TEXTS)
def test_lines_end_at_line_feeds_alone_and_a_byte_order_mark_is_skipped(tmp_path: Path, name: str, mark: str) -> None:
    path = write(tmp_path / name, [{"text": SEPARATORS}, {"text": "last"}])
    path.write_bytes(mark.encode() + path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    found = list(placed_rows(str(path), "train"))
    assert [row for _, row in found] == [{"text": SEPARATORS}, {"text": "last"}]
    first = {"a.jsonl": 1, "lines.json": 1, "a.json": 2, "a.csv": 2}[name]
    assert str(found[0][0]) == f"line {first} of {path}"


TOOLS = [{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": {"s": "x", "deep": [{"a": 1}, {"b": None}]}}]
PADDED = [
    {"messages": [{"role": "assistant", "content": None, "call": tool}, {"role": "user", "content": "x"}], "id": number}
    for number, tool in zip((None, 1), TOOLS, strict=True)
]


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow", "saved"])
def test_nulls_that_arrow_adds_are_absent_and_those_of_columns_and_contents_stay(tmp_path: Path, name: str) -> None:
    if name == "saved":
        from datasets import Dataset

        Dataset(pa.Table.from_pylist(PADDED)).save_to_disk(str(tmp_path / name))
    else:
        write(tmp_path / name, PADDED)
    first, second = rows(str(tmp_path / name), "train")
    assert first == PADDED[0]
    assert [*second["messages"][0]["call"]["arguments"]["deep"]] == [{"a": 1}, {}], "Arrow has no other null there"
    assert second["messages"][1] == {"role": "user", "content": "x"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "lines.json", "within.json"])
def test_nulls_of_json_stay(tmp_path: Path, name: str) -> None:
    assert list(rows(str(write(tmp_path / name, PADDED)), "train")) == PADDED


def test_an_object_with_messages_is_a_row(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "x"}]}
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert list(rows(str(tmp_path / "a.json"), "train")) == [row]


@pytest.mark.parametrize(
    "names",
    [
        ["train.jsonl"],
        ["train.parquet"],
        ["train.csv.gz"],
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ["train-a.csv", "train-b.csv"],
    ],
)
def test_a_directory_has_files_by_split(tmp_path: Path, names: list[str]) -> None:
    for place, name in enumerate(names):
        write(tmp_path / name, [ROWS[place]])
    write(tmp_path / "test.json", ROWS[1:])
    write(tmp_path / "training.jsonl", ROWS)
    assert list(rows(str(tmp_path), "train")) == ROWS[: len(names)]
    assert list(rows(str(tmp_path), "eval")) == ROWS[1:], "test takes the place of eval"


def test_a_directory_may_have_folders_for_configurations(tmp_path: Path) -> None:
    for index, name in enumerate(["main", "other"]):
        write(tmp_path / name / "train-00000-of-00001.parquet", ROWS[index : index + 1])
    assert list(rows(str(tmp_path), "train", "main")) == ROWS[:1]
    assert list(rows(str(tmp_path), "train", "other")) == ROWS[1:]


def test_a_directory_by_the_rules_of_the_package_datasets_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "here" / "my_rows.jsonl")
    assert list(rows(str(tmp_path / "here"), "train")) == ROWS


def test_what_the_package_datasets_saved_is_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}).save_to_disk(
        str(tmp_path / "two")
    )
    assert list(rows(str(tmp_path / "one"), "train")) == ROWS
    assert list(rows(str(tmp_path / "two"), "eval")) == ROWS[:1]
    assert [str(place) for place, _ in placed_rows(str(tmp_path / "one"), "train")][1] == f"row 1 of {tmp_path / 'one'}"
    with pytest.raises(ConfigError, match="has no split 'other'; it has train, test"):
        rows(str(tmp_path / "two"), "other")


def test_files_are_read_without_the_package_datasets(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    write(tmp_path / "b.parquet")
    code = (
        "import sys; from sluice.environments.datasets import rows;"
        f"assert len(list(rows({str(tmp_path)!r}, 'train'))) == len(list(rows({str(tmp_path / 'b.parquet')!r}, 'x'))) == 2;"
        "assert not {'datasets', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# The hub.


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with two revisions of a data set, for a machine that is offline."""
    repository = tmp_path / "datasets--owner--sums"
    for index, (revision, reference) in enumerate((("a" * 40, "v1"), ("b" * 40, "main"))):
        write(repository / "snapshots" / revision / "data" / "train-00000-of-00001.parquet", [ROWS[index]])
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / reference).write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "prepared")
    return repository


def test_a_revision_of_the_hub_is_read_from_the_cache(hub_cache: Path) -> None:
    assert list(rows("owner/sums", "train")) == ROWS[1:]
    assert list(rows("owner/sums@v1", "train")) == list(rows(f"owner/sums@{'a' * 40}", "train")) == ROWS[:1]


def test_a_revision_that_is_not_or_not_all_in_the_cache_is_refused(hub_cache: Path) -> None:
    with pytest.raises(
        ConfigError, match="revision v2 of the data set owner/sums is not in the cache, and HF_HUB_OFFLINE"
    ):
        rows("owner/sums@v2", "train")
    (part,) = hub_cache.glob("snapshots/a*/data/*")
    part.rename(part.with_name("train-00000-of-00003.parquet"))
    with pytest.raises(ConfigError, match=r"lacks 2 files of split train.*hf download owner/sums .*--revision v1"):
        rows("owner/sums@v1", "train")
    with pytest.raises(ConfigError, match="dataset: owner/other is neither a directory here nor in the cache"):
        rows("owner/other", "train")


def test_the_revision_reaches_the_package_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load_dataset(*given: object, **named: object) -> list[object]:
        asked.append((given, named))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "owner___sums").mkdir()  # so that the hub is not asked whether it exists
    ((place, row), _) = placed_rows("owner/sums@v1", "train", "main")
    assert asked == [(("owner/sums", "main"), {"split": "train", "revision": "v1"})]
    assert (str(place), row) == ("row 0 of owner/sums, split train", ROWS[0])


# Errors.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"b": }', r"line 2 of .*a\.jsonl is not JSON: Expecting value at column 7; put one"),
        ("a.jsonl", b"[1]\n", "line 1 of .* is not a JSON object"),
        ("a.jsonl", b'{"a": 1}\n"\xc3\xa9\xff', r"line 2 of .* is not JSON: 'utf-8' codec .*\(column 3\)"),
        ("a.jsonl", b'{"a": ' + b"1" * 5000 + b"}", "line 1 of .* is not JSON: Exceeds the limit"),
        ("a.json", b'[{"a": 1},\n {"a": x}]', r"line 2 of .*a\.json is not JSON: Expecting value at column 8"),
        ("a.json", b'[{"a": 1}\n {"a": 2}]', "line 2 of .*a.json is not JSON: expecting a comma .* at column 2"),
        ("a.json", b'[{"a": 1},\n 7]', "line 2 of .*a.json has a value that is not an object, but 7"),
        ("a.json", b'[{"a": 1}]\n[]', "line 2 of .*a.json is not JSON: expecting the end of the file .* column 1"),
        ("a.json", b'{"a": 1}\n{"a": }', "line 2 of .*a.json is not JSON: Expecting value at column 7"),
        ("a.json", b'[{"a": 1},\n "\xff"]', r"line 2 of .*a.json is not text: .*\(column 3\)"),
        ("a.csv", b'a,b\n"x\ny",2\n1,2,3\n', r"line 4 of .* has 3 columns, and the first line names 2 \(a, b\)"),
        ("a.csv", b"a,b\n1\n", "line 2 of .* has 1 columns"),
        ("a.csv", b'a,b\n1,2\n"1,2\n', "line 3 of .* is not CSV: unexpected end of data"),
        ("a.csv", b"a,a\n1,2\n", "line 1 of .* names the columns, and 'a' is empty or there twice"),
        ("a.csv", b"a,b\n1,\xff\n", r"line 2 of .*a\.csv is not text: .*\(column 3\)"),
        ("a.parquet", b"nonsense", "cannot read .*a.parquet"),
        ("a.parquet", b"", "cannot read .*a.parquet"),
        ("a.arrow", b"nonsense", "cannot read .*a.arrow"),
        ("a.jsonl.gz", b"nonsense", "cannot read .*a.jsonl.gz: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9],
            "cannot read .*a.jsonl.gz: Compressed file ended",
        ),
        ("a.txt", b"a,b", r"cannot read .*a\.txt: its name ends with none of \.jsonl, .*, \.arrow, nor with \.gz"),
        ("a.parquet.gz", b"a,b", r"cannot read .*a\.parquet\.gz: its name ends with none"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(rows(str(tmp_path / name), "train"))


def test_a_truncated_arrow_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "stream.arrow", ROWS * 300)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ConfigError, match=r"cannot read .*stream\.arrow"):
        list(rows(str(path), "train"))


@pytest.mark.parametrize("name", TEXTS)
def test_an_empty_file_has_no_rows_and_no_mixture_takes_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert list(rows(str(tmp_path / name), "train")) == []
    with pytest.raises(ConfigError, match=f"{name} is empty"):
        list(mixed_rows([str(tmp_path / name)], "train"))


def test_a_file_or_split_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        list(rows(str(tmp_path / "none.jsonl"), "train"))
    write(tmp_path / "train.jsonl")
    with pytest.raises(
        ConfigError, match=r"no split 'other': it needs a file such as other.jsonl .* there is train.jsonl"
    ):
        list(rows(str(tmp_path), "other"))


# Memory.


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.json", "a.parquet", "file.arrow", "stream.arrow"]
)
def test_rows_that_were_read_take_no_memory(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"text": str(number) * 200, "number": str(number)} for number in range(10_000)])
    size = 10_000 * 200 * 4
    list(islice(rows(str(path), "train"), 1))  # imports
    tracemalloc.start()
    try:
        assert sum(1 for _ in rows(str(path), "train")) == 10_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The text of a JSON file is in memory, twice while it is put together.
    assert peak < (2.5 * size if name == "a.json" else size / 5)


def test_a_file_is_read_as_far_as_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\nnonsense\n')
    assert list(islice(rows(str(tmp_path / "a.jsonl"), "train"), 2)) == [{"a": 1}, {"a": 2}]


# Mixtures.


def numbered(path: Path, count: int) -> str:
    return str(write(path, [{"from": path.stem, "number": number} for number in range(count)]))


def test_data_sets_with_shares_are_mixed_evenly_and_end_with_the_first(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.jsonl", 70), numbered(tmp_path / "b.parquet", 1000)
    found = [row for _, row in mixed_rows([f"{a}=0.7", f"{b}=0.3"], "train")]
    assert [row["number"] for row in found if row["from"] == "a"] == list(range(70)), "each once, in order"
    for end in range(1, len(found) + 1):
        assert abs(sum(row["from"] == "a" for row in found[:end]) - 0.7 * end) < 1
    assert len(found) == 100
    assert [row for _, row in mixed_rows([f"{a}=7", f"{b}=3"], "train")] == found, "only proportions matter"


@settings(max_examples=40)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_every_data_set_has_its_share_at_any_time(weights: list[int]) -> None:
    with TemporaryDirectory() as directory:
        names = [numbered(Path(directory) / f"{index}.jsonl", 60) for index in range(len(weights))]
        mixed = mixed_rows([f"{name}={weight / 10}" for name, weight in zip(names, weights, strict=True)], "train")
        found = [int(row["from"]) for _, row in mixed]
    assert len(found) >= 60
    for end in range(1, len(found) + 1):
        for index, weight in enumerate(weights):
            assert abs(found[:end].count(index) - end * weight / sum(weights)) < 1


def test_data_sets_without_shares_come_one_after_the_other(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.csv", 2), numbered(tmp_path / "b.parquet", 3)
    places = [str(place) for place, _ in mixed_rows([a, b], "train")]
    assert places == [f"line 2 of {a}", f"line 3 of {a}", *(f"row {number} of {b}" for number in range(3))]


def test_a_name_that_exists_has_no_share(tmp_path: Path) -> None:
    path = str(write(tmp_path / "x=0.5" / "train.jsonl").parent)
    assert [(each.dataset, each.share) for each in parts([path])] == [(path, None)]
    assert len(list(mixed_rows(path, "train"))) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["a.jsonl=0.5", "b.jsonl"], "b.jsonl has no share, and other data sets have one"),
        (["a.jsonl=0", "b.jsonl=1"], "a.jsonl=0: a share of 0 takes no row"),
    ],
)
def test_shares_that_make_no_mixture_are_refused(data: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(data)


def test_other_files_beside_those_of_a_split_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n')
    for name in ("train.backup.jsonl", "train.csv", "train.json"):
        (tmp_path / name).write_text("[]")
    assert list(rows(str(tmp_path), "train")) == [{"a": 1}]


def test_files_of_several_kinds_are_not_read_together(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a\n1\n")
    (tmp_path / "train.json").write_text('[{"a": 1}]')
    with pytest.raises(ConfigError, match=r"in files of several kinds \(train.csv, train.json\): name one of them"):
        list(rows(str(tmp_path), "train"))


def test_a_row_with_a_list_of_tools_is_one_row(tmp_path: Path) -> None:
    row = {"prompt": "x", "tools": [{"type": "function"}]}
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert list(rows(str(tmp_path / "a.json"), "train")) == [row]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_that_is_nested_too_deeply_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(ConfigError, match="is not JSON"):
        list(rows(str(tmp_path / name), "train"))
