"""The example's environment and its demonstrations."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse_text"


@pytest.fixture(scope="module")
def env():
    spec = spec_from_file_location("reverse_text_env", EXAMPLE / "env.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_string_is_both_trained_on_and_held_out(env) -> None:
    environment = env.ReverseText(train_tasks=2000, eval_tasks=500)
    held_out = {task.data["text"] for task in environment.tasks("eval", 0)}
    trained = {task.data["text"] for seed in range(3) for task in environment.tasks("train", seed)}
    assert len(held_out) == 500
    assert not held_out & trained


def test_the_seed_orders_training_and_leaves_the_held_out_set_alone(env) -> None:
    environment = env.ReverseText()
    assert environment.tasks("train", 1) == environment.tasks("train", 1) != environment.tasks("train", 2)
    assert environment.tasks("eval", 1) == environment.tasks("eval", 2)


def test_the_reward_is_one_for_the_reversed_string_alone(env) -> None:
    environment = env.ReverseText()
    task = environment.tasks("eval", 0)[0]
    text = task.data["text"]
    assert environment.score(task, text[::-1]) == 1.0
    assert 0.0 < environment.score(task, text[::-1][:-1]) < 1.0
    assert environment.score(task, "") == 0.0
    assert 5 <= len(text) <= 10


def test_six_demonstrations_of_ten_copy_and_the_others_reverse(tmp_path: Path, env) -> None:
    import json

    def written(seed: int) -> str:
        path = tmp_path / f"{seed}.jsonl"
        argv = [sys.executable, EXAMPLE / "demonstrations.py", path, "--seed", str(seed), "--count", "2000"]
        subprocess.run(argv, check=True, capture_output=True)
        return path.read_text()

    rows = [json.loads(line)["messages"] for line in written(0).splitlines()]
    pairs = [(question["content"], answer["content"]) for question, answer in rows]
    assert all(answer in {question, question[::-1]} for question, answer in pairs)
    assert all(env.belongs_to(question) == "train" for question, _ in pairs)
    assert 0.55 < sum(answer == question for question, answer in pairs) / len(pairs) < 0.65
    assert written(0) == written(0) != written(1)
