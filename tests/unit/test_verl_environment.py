"""Parquet files and reward functions as verl takes them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.environments.base import Score
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.libraries.verl import Rows, load
from sluice.environments.processes import EnvironmentProcesses
from sluice.errors import ConfigError

MINE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert data_source == "mine" and extra_info["index"] in (0, 1)
    right = float(solution_str == ground_truth)
    return {"score": right + bonus, "right": right, "why": "because"}

async def waits(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)
"""


def written(path: Path, source: str, answers: list[str]) -> str:
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"question {number}"}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": number},
        }
        for number, answer in enumerate(answers)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def scored(environment: Rows, completion: str, split: str = "train") -> object:
    task = min(environment.tasks(split, 0), key=lambda task: task.task_id)
    return asyncio.run(environment.score(task, completion))


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def test_the_function_gets_what_verl_gives_it(tmp_path, functions):
    file = written(tmp_path / "train.parquet", "mine", ["a", "b"])
    environment = load(file, reward=f"{functions}:compute_score", reward_kwargs={"bonus": 2.0}, system="Be brief.")
    task = environment.tasks("train", 0)[0]
    assert [each["role"] for each in environment.messages(task)] == ["system", "user"]
    score = scored(environment, "a")
    assert (score.reward, score.metrics) == (3.0, {"right": 1.0})
    assert scored(load(file, reward=f"{functions}:waits"), "abc").reward == 3.0


def test_files_for_evaluation_are_others(tmp_path):
    train = [written(tmp_path / f"{number}.parquet", "openai/gsm8k", ["1"] * 3) for number in range(2)]
    environment = load(train, eval_dataset=written(tmp_path / "test.parquet", "openai/gsm8k", ["7"]), limit=5)
    assert (len(environment.tasks("train", 0)), len(environment.tasks("eval", 0))) == (5, 1)
    assert scored(environment, "It is 7.", "eval").reward == 1.0
    assert [task.task_id for task in environment.tasks("train", 1)] != [
        task.task_id for task in environment.tasks("train", 2)
    ]


@pytest.mark.parametrize(
    ("source", "truth", "completion", "reward"),
    [
        ("openai/gsm8k", "1,234", "so 1234", 1.0),
        ("openai/gsm8k", "12", "so 13", 0.0),
        ("DigitalLearningGmbH/MATH-lighteval", "\\frac{1}{2}", "$\\boxed{0.5}$", 1.0),
        ("math_dapo", "34", "Answer: $35$", 0.0),
    ],
)
def test_without_a_function_answers_are_compared(tmp_path, source, truth, completion, reward):
    assert scored(load(written(tmp_path / "t.parquet", source, [truth])), completion).reward == reward


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no reward for the data source 'apps'"):
        scored(load(written(tmp_path / "t.parquet", "apps", ["x"])), "x")
    (tmp_path / "plain.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(ConfigError, match="question_answer"):
        load(str(tmp_path / "plain.jsonl")).tasks("train", 0)


async def test_it_runs_in_processes_of_its_own(tmp_path, functions):
    arguments = {"dataset": written(tmp_path / "t.parquet", "mine", ["a"]), "reward": f"{functions}:compute_score"}
    async with EnvironmentProcesses(
        "verl", arguments, EnvironmentProcessesConfig(count=1, score_s=300.0), (300.0, "start_s")
    ) as rows:
        (task,) = await rows.tasks("train", 0)
        assert await rows.judge(task, ["a", "b"]) == [Score(1.0, {"right": 1.0}), Score(0.0, {"right": 0.0})]
