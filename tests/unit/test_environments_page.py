"""The environments of docs/environments.md work as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator_svc.envs.base import Turn
from orchestrator_svc.envs.loading import load_environment

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "page_env.py"
    path.write_text("\n".join(block.split("```")[0] for block in PAGE.read_text().split("```python\n")[1:]))
    return path


def test_the_environment_of_one_question_scores_an_answer(code: Path) -> None:
    capitals = load_environment(f"{code}:Capitals", {})
    task = capitals.tasks("train", 0)[2]
    assert capitals.messages(task)[0]["content"] == "What is the capital of Peru?"
    assert (capitals.score(task, "It is Lima."), capitals.score(task, "Quito")) == (1.0, 0.0)


def test_the_environment_of_several_turns_answers_until_the_number_is_found(code: Path) -> None:
    guess = load_environment(f"{code}:Guess", {})
    episode = guess.reset(guess.tasks("train", 0)[6], seed=0)
    assert episode.messages
    assert not episode.step("3").done
    assert episode.step(" 7\n") == Turn(reward=1.0, done=True)
