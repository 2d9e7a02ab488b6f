"""The environments of docs/environments.md work as they stand there, in processes as in a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.environments.base import Turn
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.worker import Reason

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "page_env.py"
    path.write_text("\n".join(block.split("```")[0] for block in PAGE.read_text().split("```python\n")[1:]))
    return path


ELSEWHERE = {"start_new_session", "quarantine_after", "failed_calls", "processes_ended", "scoring_s"}
"""Names in the section on processes that are not settings of processes."""


def processes(reference: str) -> EnvironmentProcesses:
    return EnvironmentProcesses(reference, {}, EnvironmentProcessesConfig(count=1, score_s=300.0), (300.0, "start_s"))


async def test_the_environment_of_one_question_scores_an_answer(code: Path) -> None:
    async with processes(f"{code}:Capitals") as capitals:
        task = (await capitals.tasks("train", 0))[2]
        assert (await capitals.messages(task))[0]["content"] == "What is the capital of Peru?"
        assert await capitals.score(task, ["It is Lima.", "Quito"]) == [1.0, 0.0]


async def test_the_environment_of_several_turns_answers_until_the_number_is_found(code: Path) -> None:
    async with processes(f"{code}:Guess") as guess:
        task = (await guess.tasks("train", 0))[6]
        async with guess.episode(task, seed=0) as episode:
            assert episode.messages
            assert not (await episode.step("3")).done
            assert await episode.step(" 7\n") == Turn(messages=[], reward=1.0, done=True)


def test_the_page_names_every_reason_and_only_settings_that_exist() -> None:
    text = PAGE.read_text()
    assert set(re.findall("ENVIRONMENT_[A-Z_]+", text)) == set(Reason)
    section = text.split("## Processes")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z]+_[a-z_]+)[`:]", section)) - ELSEWHERE
    assert named <= set(EnvironmentProcessesConfig.model_fields), named
