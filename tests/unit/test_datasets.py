"""Rows of data sets: files, directories of files, and what the package `datasets` saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.environments.datasets import rows
from sluice.errors import ConfigError

ROWS = [{"question": "2 + 2?", "answer": "#### 4"}, {"question": "é?", "answer": "5"}]


def write(path: Path, found: list[dict[str, str]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(found), path)
    else:
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in found) + "\n\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_is_all_of_its_splits(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    assert list(rows(str(path), "train")) == list(rows(str(path), "eval")) == ROWS


@pytest.mark.parametrize(
    "names",
    [["train.jsonl"], ["train.parquet"], ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]],
)
def test_a_directory_has_files_by_split(tmp_path: Path, names: list[str]) -> None:
    for place, name in enumerate(names):
        write(tmp_path / name, [ROWS[place]])
    write(tmp_path / "test.jsonl", ROWS[1:])
    assert list(rows(str(tmp_path), "train")) == ROWS[: len(names)]
    assert list(rows(str(tmp_path), "eval")) == ROWS[1:], "test takes the place of eval"


def test_what_the_package_datasets_saved_is_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}).save_to_disk(
        str(tmp_path / "two")
    )
    assert list(rows(str(tmp_path / "one"), "train")) == ROWS
    assert list(rows(str(tmp_path / "two"), "eval")) == ROWS[:1]
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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{', "line 2 of .* is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 of .* is not a JSON object"),
        ("a.jsonl", b"\xff", "line 1 of .* is not JSON: 'utf-8' codec"),
        ("a.parquet", b"nonsense", "cannot read"),
        ("a.csv", b"a,b", r"neither \.jsonl nor \.parquet"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(rows(str(tmp_path / name), "train"))


def test_a_file_or_split_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        list(rows(str(tmp_path / "none.jsonl"), "train"))
    write(tmp_path / "train.jsonl")
    with pytest.raises(
        ConfigError, match=r"no split 'other': it needs a file such as other.jsonl .* there is train.jsonl"
    ):
        list(rows(str(tmp_path), "other"))
