"""The example with a real model: its environment, and what the report shows of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from sluice.cli import quickstart
from sluice.environments.loading import load_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "sums"


@pytest.fixture(scope="module")
def environment():
    return load_environment(f"{EXAMPLE / 'env.py'}:Sums", {})


def test_no_sum_is_both_trained_on_and_held_out(environment) -> None:
    held_out = {task.task_id for task in environment.tasks("eval", 0)}
    trained = {task.task_id for task in environment.tasks("train", 0)}
    assert len(held_out) == 128
    assert len(trained) == 21 * 21 - 128
    assert not held_out & trained


def test_the_seed_orders_training_and_leaves_the_held_out_sums_alone(environment) -> None:
    assert environment.tasks("train", 1) == environment.tasks("train", 1) != environment.tasks("train", 2)
    assert environment.tasks("eval", 1) == environment.tasks("eval", 2)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("{sum}", True),
        ("{a} + {b} = {sum}.", True),
        ("The sum of {a} and {b} is {sum}", True),
        ("{sum}, or perhaps 99", False),
        ("{sum}0", False),
        ("eleven", False),
        ("", False),
    ],
)
def test_the_last_number_of_an_answer_counts(environment, answer: str, right: bool) -> None:
    task = environment.tasks("eval", 0)[0]
    text = answer.format(sum=task.data["a"] + task.data["b"], **task.data)
    assert environment.score(task, text) == float(right)


def test_the_question_names_both_operands(environment) -> None:
    task = environment.tasks("eval", 0)[0]
    (message,) = environment.messages(task)
    assert message == {"role": "user", "content": f"What is {task.data['a']} + {task.data['b']}?"}


def test_the_same_prompts_are_shown_before_and_after(tmp_path: Path) -> None:
    def row(task: int, text: str, reward: float, *, greedy: bool = False) -> dict[str, object]:
        return {
            "task_id": f"{task}+1",
            "prompt": f"What is [{task}] + 1?",
            "completion": text,
            "reward": reward,
            "greedy": greedy,
            "truncated": False,
        }

    before = [row(task, "who [knows]", 0.0) for task in range(12)]
    after = [each for task in range(12) for each in (row(task, "G", 1.0, greedy=True), row(task, f"S{task}", 1.0))]
    for name, rows in (("before", before), ("after", after)):
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in rows))
    out = io.StringIO()
    console = Console(file=out, width=120)
    quickstart.show_conversations(console, tmp_path / "before", tmp_path / "after", 10)
    text = out.getvalue()
    assert text.count("- who [knows]") == 10
    assert "What is [9] + 1?" in text
    assert "+ S9" in text
    assert "S10" not in text
    assert "G" not in text
