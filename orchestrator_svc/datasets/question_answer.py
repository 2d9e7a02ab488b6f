"""Questions with answers, from a JSONL file or a data set of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator_svc.envs.base import Task
from sluice.config import ConfigError

__all__ = ["load_questions"]


def load_questions(
    dataset: str, split: str, *, question: str, answer: str, name: str | None = None, limit: int | None = None
) -> list[Task]:
    """Tasks with ``question`` (text or messages) and ``answer`` in their data.

    Args:
        dataset: A ``.jsonl`` file, a directory with one per split, or a hub id (needs the package `datasets`).
        split: Split of the data set; a single file is all of its splits.
        question: Field of the question: a text, or messages.
        answer: Field of the answer.
        name: Configuration of a hub data set.
        limit: Most tasks.

    Raises:
        ConfigError: if the data set cannot be read or a row lacks a field.
    """
    tasks: list[Task] = []
    for index, row in enumerate(_rows(dataset, split, name)):
        if limit is not None and index >= limit:
            break
        if question not in row or answer not in row:
            raise ConfigError(
                f"row {index} of {dataset} has the fields {', '.join(row)}, not {question!r} and {answer!r}:"
                " set environment_args question and answer"
            )
        task_id = str(row.get("id", f"{split}-{index}"))
        tasks.append(Task(task_id, {"question": row[question], "answer": str(row[answer])}))
    return tasks


def _rows(dataset: str, split: str, name: str | None) -> Iterable[Mapping[str, Any]]:
    path = Path(dataset)
    if path.is_dir():
        path /= f"{split}.jsonl"
    if path.suffix == ".jsonl" or path.exists():
        return _jsonl(path)
    from datasets import load_dataset  # noqa: PLC0415 - slow to import, needed for hub data sets alone

    try:
        rows: Iterable[Mapping[str, Any]] = load_dataset(dataset, name, split=split)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load data set {dataset!r}, split {split!r}: {error}") from error
    return rows


def _jsonl(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"line {number} of {path} is not a JSON object")
        yield row
