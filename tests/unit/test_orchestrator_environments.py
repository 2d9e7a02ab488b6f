"""Environments and data sets are found by what the settings call them, and mistakes are told with a remedy."""

from __future__ import annotations

import json

import pytest

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.run.workflows import MultiTurn, Scored, choose_workflow
from sluice.config import ConfigError
from sluice.environments.base import SingleTurnEnvironment
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.loading import load_environment
from sluice.environments.processes import EnvironmentProcesses
from sluice.loading import check_there, load_attribute


def test_a_file_beside_which_others_lie_is_an_environment(tmp_path) -> None:
    (tmp_path / "neighbour_of_env.py").write_text("WORD = 'hello'\n")
    (tmp_path / "some_env.py").write_text(
        "from neighbour_of_env import WORD\n"
        "from sluice.environments.base import Task\n"
        "class Env:\n"
        "    name = 'env'\n"
        "    def __init__(self, count=1): self.count = count\n"
        "    def tasks(self, split, seed): return [Task(WORD, {})] * self.count\n"
        "    def messages(self, task): return []\n"
        "    def score(self, task, completion): return 0.0\n"
    )
    environment = load_environment(f"{tmp_path}/some_env.py:Env", {"count": 2})
    assert isinstance(environment, SingleTurnEnvironment)
    assert [task.task_id for task in environment.tasks("train", 0)] == ["hello", "hello"]
    with pytest.raises(ConfigError, match="refuses its environment_args"):
        load_environment(f"{tmp_path}/some_env.py:Env", {"size": 2})
    with pytest.raises(ConfigError, match="it defines Env"):
        load_environment(f"{tmp_path}/some_env.py:Other", {})


def test_an_error_names_the_arguments_of_an_environment_and_never_their_values(tmp_path) -> None:
    (tmp_path / "judged_env.py").write_text(
        "class Judged:\n"
        "    def __init__(self, judge_key, model='m'):\n"
        "        raise ValueError(f'the judge refuses {judge_key}')\n"
    )
    arguments = {"judge_key": "sk-do-not-print", "model": {"token": "hf-nor-this"}}
    with pytest.raises(ConfigError, match="judge_key, model") as refused:
        load_environment(f"{tmp_path}/judged_env.py:Judged", arguments)
    assert "the judge refuses" in str(refused.value)
    assert "sk-do-not-print" not in str(refused.value)
    assert "hf-nor-this" not in str(refused.value)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("", "no environment is set"),
        ("unheard_of", "there are: .*question_answer"),
        ("no.such.module:Env", "cannot import"),
        ("/no/such/file.py:Env", "there is no environment file"),
        ("json:JSONDecoder", "is not an environment"),
    ],
)
def test_what_is_no_environment_is_told_so(reference, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(reference, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Env:\n    pass\ndef make():\n    pass\n", r"some_env\.py has no 'Word'; it defines Env, make$"),
        (
            "class Env:\n    pass\n  x\n",
            r"cannot import environment .*some_env\.py:3: unindent does not match .*; correct the file",
        ),
    ],
)
def test_what_a_file_lacks_is_found_without_importing_it_and_said_as_the_import_says_it(
    tmp_path, text, message
) -> None:
    location = f"{tmp_path}/some_env.py:Word"
    (tmp_path / "some_env.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_there(location, "environment")
    with pytest.raises(ConfigError, match=message):
        load_attribute(location, "environment")


@pytest.mark.parametrize(
    "text",
    [
        "raise RuntimeError\nclass Word: pass\n",
        "if True:\n    from words import Word\n",
        "from words import other as Word\n",
        "Word = make()\n",
        "from words import *\n",
        "def __getattr__(name): pass\n",
        "globals()['Word'] = 1\n",
    ],
)
def test_a_file_that_may_bind_a_name_is_accepted_without_importing_it(tmp_path, text) -> None:
    (tmp_path / "some_env.py").write_text(text)
    check_there(f"{tmp_path}/some_env.py:Word", "environment")


def test_an_environment_without_a_name_is_told_what_it_lacks(tmp_path) -> None:
    (tmp_path / "some_env.py").write_text("class Env:\n    def tasks(self, split, seed): return []\n")
    with pytest.raises(ConfigError, match="is not an environment, since it has no name: it needs name, tasks"):
        load_environment(f"{tmp_path}/some_env.py:Env", {})


def test_questions_come_from_a_file_of_lines(tmp_path) -> None:
    rows = [{"q": f"{n}+{n}?", "a": str(2 * n)} for n in range(5)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"dataset": str(path), "question": "q", "answer": "a", "system": "Add.", "limit": 3}
    environment = load_environment("question_answer", arguments)
    assert isinstance(environment, SingleTurnEnvironment)
    tasks = environment.tasks("train", 1)
    assert sorted(task.data["answer"] for task in tasks) == ["0", "2", "4"]
    assert [message["role"] for message in environment.messages(tasks[0])] == ["system", "user"]
    assert environment.score(tasks[0], tasks[0].data["answer"]) == 1.0
    with pytest.raises(ConfigError, match="set environment_args question and answer"):
        load_environment("question_answer", {"dataset": str(path)}).tasks("train", 0)


BOTH = """
from sluice.environments.base import Task, Turn

class Single:
    name = "single"
    def tasks(self, split, seed): return []
    def messages(self, task): return []
    def score(self, task, completion): return 0.0

class Countdown:
    name = "countdown"
    def tasks(self, split, seed): return []
    def reset(self, task, seed): return None
"""


async def test_the_workflow_goes_by_what_the_environment_can_do(tmp_path) -> None:
    (tmp_path / "both_env.py").write_text(BOTH)
    limit, settings = (300.0, "start_s"), EnvironmentProcessesConfig(count=1)
    async with EnvironmentProcesses(f"{tmp_path}/both_env.py:Countdown", {}, settings, limit) as countdown:
        assert isinstance(choose_workflow(OrchestratorConfig(), countdown), MultiTurn)
        with pytest.raises(ConfigError, match="workflow single_turn does not fit environment countdown"):
            choose_workflow(OrchestratorConfig(workflow="single_turn"), countdown)
    async with EnvironmentProcesses(f"{tmp_path}/both_env.py:Single", {}, settings, limit) as single:
        assert isinstance(choose_workflow(OrchestratorConfig(), single), Scored)
        with pytest.raises(ConfigError, match="workflow multi_turn does not fit environment single"):
            choose_workflow(OrchestratorConfig(workflow="multi_turn"), single)
