"""Tasks that are kept in a file: their order, what they hold, and how much memory a large split takes on its way to the curriculum."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator_svc.run.task_stream import TaskStream
from sluice.environments import Task, stored_tasks
from sluice.environments.child import Server
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.framing import MAX_FRAME_BYTES, NotPlainError, encode
from sluice.environments.libraries import trl, verl
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.question_answer import QuestionAnswer
from sluice.environments.stored_tasks import StoredTasks
from sluice.errors import ConfigError

TASKS = [Task(f"train-{number}", {"text": f"é{number}", "deep": [{"a": None}]}, number or None) for number in range(50)]


def stored(tasks: list[Task]) -> StoredTasks:
    found = StoredTasks()
    for each in tasks:
        found.append(each)
    return found


@pytest.mark.parametrize("in_memory", [0, 1 << 20])
def test_tasks_come_back_as_they_were_in_every_order(monkeypatch: pytest.MonkeyPatch, in_memory: int) -> None:
    monkeypatch.setattr(stored_tasks, "_IN_MEMORY_BYTES", in_memory)
    found = stored(TASKS)
    assert found == TASKS
    assert (found[7], found[-1], found[3:9:2]) == (TASKS[7], TASKS[-1], TASKS[3:9:2])
    found.append(Task("last"))
    found.cut(50)
    assert found == TASKS != stored(TASKS[:-1])


def test_the_order_of_a_seed_is_that_of_a_list(tmp_path: Path) -> None:
    found, listed = stored(TASKS), list(TASKS)
    found.shuffle(3)
    random.Random(3).shuffle(listed)
    assert found == listed != TASKS, "a run that is resumed draws the same tasks"


def test_data_that_is_not_plain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotPlainError, match=r"data\.image is of type bytes"):
        StoredTasks().append(Task("t", {"image": b"x"}))
    pq.write_table(
        pa.Table.from_pylist([{"prompt": "a", "image": None}, {"prompt": "b", "image": b"x"}]), tmp_path / "a.parquet"
    )
    environment = trl.load(dataset=str(tmp_path / "a.parquet"), reward_funcs="json:dumps")
    with pytest.raises(ConfigError, match=r"row 1 of .*a\.parquet does not fit: data\.row\.image is of type bytes"):
        environment.tasks("train", 0)


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (None, "prompt is null"),
        ([{"role": "user", "content": "x"}, {"content": "y"}], r"prompt\[1\] is {'content': 'y'}"),
        (7, "prompt is 7"),
    ],
)
def test_a_prompt_that_cannot_be_one_is_named_with_its_place(tmp_path: Path, prompt: object, told: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "fits"}) + "\n" + json.dumps({"prompt": prompt}) + "\n")
    environment = trl.load(dataset=str(tmp_path / "a.jsonl"), reward_funcs="json:dumps")
    with pytest.raises(ConfigError, match=rf"line 2 of .*a\.jsonl does not fit: {told}"):
        environment.tasks("train", 0)


def write_rows(path: Path, count: int) -> int:
    """Write rows that fit all three environments; return how many bytes they have."""
    with path.open("w") as file:
        for number in range(count):
            row = {
                "question": "x" * 1000,
                "answer": str(number),
                "prompt": "x" * 1000,
                "reward_model": {"ground_truth": "1"},
            }
            file.write(json.dumps(row) + "\n")
        return file.tell()


@pytest.mark.parametrize("name", ["question_answer", "trl", "verl"])
def test_a_split_that_is_larger_than_memory_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(stored_tasks, "_IN_MEMORY_BYTES", 1 << 16)
    path = tmp_path / "a.jsonl"
    size = write_rows(path, 1200)
    made = {
        "question_answer": lambda: QuestionAnswer(str(path)),
        "trl": lambda: trl.load(dataset=str(path), reward_funcs="json:dumps"),
        "verl": lambda: verl.load(str(path), reward="json:dumps"),
    }[name]()
    tracemalloc.start()
    try:
        stream = TaskStream(made.tasks("train", 0), seed=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 4
    task = stream.get(stream.at(0))
    assert task is not None
    assert len(str(task.data)) > 1000
    assert stream.get("other") is None


async def test_the_orchestrator_keeps_the_tasks_of_an_environment_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_rows(path, 1500)
    async with EnvironmentProcesses(
        "question_answer", {"dataset": str(path)}, EnvironmentProcessesConfig(count=1), (60.0, "start_s")
    ) as questions:
        tasks = await questions.tasks("train", 5)
    assert isinstance(tasks, StoredTasks)
    assert tasks == QuestionAnswer(str(path)).tasks("train", 5)
    assert len({each.task_id for each in tasks}) == 1500


async def test_a_page_of_large_tasks_fits_a_message() -> None:
    tasks = [Task(str(number), {"text": "\U0001f600" * 500_000}) for number in range(12)]
    server = Server(SimpleNamespace(tasks=lambda *_: tasks))
    found: list[str] = []
    while len(found) < 12:
        call = {
            "id": 1,
            "method": "tasks",
            "arguments": {"listing": "1", "split": "train", "seed": 0, "start": len(found)},
        }
        answer = await server.answer(call)
        assert len(encode(answer)) < MAX_FRAME_BYTES, "all of them have 72 MB"
        found += [each["task_id"] for each in answer["value"]["tasks"]]
    assert found == [each.task_id for each in tasks]
