"""The examples' environments: what they ask, what an answer is worth, and that no held-out task is ever trained on."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orchestrator_svc.commands.eval.command import check_evaluation
from orchestrator_svc.commands.eval.config import EvalConfig
from sluice.cli.rl import run
from sluice.config import load_command
from sluice.environments import Task, Turn
from sluice.environments.loading import load_environment
from sluice.loading import load_attribute

EXAMPLES = Path(__file__).parents[2] / "examples"

ENVIRONMENTS = {"arithmetic": "Arithmetic", "alphabet_sort": "AlphabetSort", "wordle": "Wordle"}

NO_TENSORS = b"\x02" + bytes(7) + b"{}"
"""A safetensors file of a model that is not loaded."""

STRANGE = [
    "",
    "\n\n",
    "I do not know.",
    "[",
    "[]",
    "[crane",
    "[cranes]",
    "[cr4ne]",
    "NaN",
    "-",
    "*",
    "1e999",
    "\ud7ff\0 é",
    "9" * 400,
]
"""Replies that answer nothing."""


def environment(name: str, **arguments: Any) -> Any:
    return load_environment(f"{EXAMPLES / name / 'env.py'}:{ENVIRONMENTS[name]}", arguments)


def demonstrations(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import an example's demonstrations as the command does, with its own `env` beside it."""
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    for module in ("env", "demonstrations"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    found = importlib.import_module("demonstrations")
    for module in ("env", "demonstrations"):
        monkeypatch.delitem(sys.modules, module)
    return found


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_no_task_is_both_trained_on_and_held_out(name: str) -> None:
    made = environment(name)
    held_out = [task.task_id for task in made.tasks("eval", 0)]
    trained = [task.task_id for seed in range(3) for task in made.tasks("train", seed)]
    assert len(held_out) == len(set(held_out)) >= 128
    assert not {*held_out} & {*trained}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_seed_orders_training_and_leaves_the_held_out_tasks_alone(name: str) -> None:
    made = environment(name)
    assert made.tasks("train", 1) == made.tasks("train", 1) != made.tasks("train", 2)
    assert made.tasks("eval", 1) == made.tasks("eval", 2)
    with pytest.raises(ValueError, match="train and eval"):
        made.tasks("test", 0)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_demonstrations_are_of_tasks_to_train_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(demonstrations(name, monkeypatch).demonstrations(0, 300))
    assert len(rows) == 300
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    made = environment(name)
    if name == "arithmetic":
        asked = {made.messages(task)[0]["content"] for task in made.tasks("eval", 0)}
        assert not asked & {row["messages"][0]["content"] for row in rows}
    elif name == "alphabet_sort":
        assert "*" in json.dumps(rows)
    else:
        played = environment("wordle", words=64, brief=True, opened=True)
        asked = {played.reset(task, 0).messages[0]["content"] for task in played.tasks("train", 0)}
        assert {row["messages"][0]["content"] for row in rows} <= asked


@pytest.mark.parametrize("files", [["rl.toml"], ["rl.toml", "gpu.toml"]], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_settings_of_a_run_are_valid(name: str, files: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 32768}))
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS)
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.chdir(EXAMPLES.parent)
    settings = [word for file in files for word in ("@", f"examples/{name}/{file}")]
    with pytest.raises(SystemExit) as stopped:
        run([*settings, "--model", str(tmp_path), "--dry-run"])
    assert stopped.value.code == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert load_environment(printed["orchestrator"]["environment"], printed["orchestrator"]["environment_args"])
    assert printed["rollout"]["engine"] == ("transformers" if len(files) == 1 else "vllm")


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_evaluation_asks_held_out_tasks_as_the_run_asks_its_own(name: str, monkeypatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    told = load_command(
        EvalConfig, ["@", f"examples/{name}/eval.toml", "--model", "a/b"], "eval", check=check_evaluation
    )
    trained = tomllib.loads((EXAMPLES / name / "rl.toml").read_text())["orchestrator"]
    assert told.split == "eval"
    assert (told.environment, told.environment_args) == (trained["environment"], trained.get("environment_args", {}))
    assert told.prompts <= len(load_environment(told.environment, told.environment_args).tasks("eval", 0))


@pytest.mark.slow
@pytest.mark.parametrize("completion", STRANGE)
@pytest.mark.parametrize("name", ["alphabet_sort", "wordle"])
def test_an_episode_of_strange_replies_ends_with_a_low_reward(name: str, completion: str) -> None:
    made = environment(name)
    episode = made.reset(made.tasks("train", 0)[0], 0)
    turns = [episode.step(completion)]
    while not turns[-1].done:
        assert turns[-1].messages[0]["role"] == "user"
        turns.append(episode.step(completion))
    assert 0 <= sum(turn.reward or 0 for turn in turns) <= 0.1
    assert len(turns) <= 6


@pytest.mark.parametrize("completion", STRANGE)
def test_a_strange_answer_to_a_problem_is_wrong(completion: str) -> None:
    made = environment("arithmetic")
    assert made.score(made.tasks("train", 0)[0], completion) == 0


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("35", True),
        ("17+10=27, 27+8=35", True),
        ("The answer is 35.", True),
        ("It is 35.0", True),
        ("35, or 36", False),
        ("35.5", False),
        ("135", False),
    ],
)
def test_the_last_number_of_an_answer_counts(answer: str, right: bool) -> None:
    assert environment("arithmetic").score(Task("17 + 18", {"answer": 35}), answer) == right


def test_problems_have_each_operator_equally_often_and_the_right_answer() -> None:
    tasks = environment("arithmetic").tasks("eval", 0)
    counts = {symbol: sum(f" {symbol} " in task.task_id for task in tasks) for symbol in "+-*"}
    assert max(counts.values()) - min(counts.values()) <= 1
    results = [eval(task.task_id) for task in tasks]
    assert results == [task.data["answer"] for task in tasks]
    assert min(results) >= 0


def test_turned_around_a_problem_stays_in_its_split() -> None:
    made = environment("arithmetic", eval_tasks=10_000, train_tasks=10_000)
    trained = {task.task_id for task in made.tasks("train", 0)}
    for task in made.tasks("eval", 0):
        a, symbol, b = task.task_id.split()
        assert symbol == "-" or f"{b} {symbol} {a}" not in trained


def test_working_ends_with_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    worked_out = demonstrations("arithmetic", monkeypatch).worked_out
    assert worked_out(17, "+", 18) == "17+10=27, 27+8=35"
    assert worked_out(27, "-", 18) == "27-10=17, 17-8=9"
    assert worked_out(17, "*", 8) == "10*8=80, 7*8=56, 80+56=136"


SORTED = Task("", {"turns": [["Zoe", "Ada"], ["Mia"], ["Bob", "Tom"]], "by": ""})

RIGHT = ["Ada\nZoe", "Ada\nMia*\nZoe", "Ada\nBob*\nMia\nTom*\nZoe"]


def sorting(answers: list[str], task: Task = SORTED, **arguments: Any) -> float:
    episode = environment("alphabet_sort", **arguments).reset(task, 0)
    turns = [episode.step(answer) for answer in answers]
    assert [turn.done for turn in turns] == [False, False, True]
    return sum(turn.reward for turn in turns)


def test_each_turn_is_worth_as_much_and_only_new_names_are_marked() -> None:
    assert sorting(RIGHT) == 1
    assert sorting(["", *RIGHT[1:]]) == pytest.approx(2 / 3)
    assert sorting([*RIGHT[:2], RIGHT[2].replace("Mia", "Mia*")]) < 0.9


def test_a_list_in_another_form_is_the_same_list() -> None:
    assert sorting(["1. Ada\n2. Zoe", "- Ada\n- Mia *\n- Zoe\n", "\n\n".join(RIGHT[2].split("\n"))]) == 1


def test_names_at_the_end_in_place_of_sorted_earn_part_of_the_reward() -> None:
    appended = [RIGHT[0], "Ada\nZoe\nMia*", "Ada\nZoe\nMia\nBob*\nTom*"]
    assert 1 / 3 < sorting(appended) < 0.6
    assert sorting(appended, power=1.0) > sorting(appended) > sorting(appended, power=8.0)


def test_the_last_name_decides_where_the_task_says_so() -> None:
    names = {"turns": [["Zoe Abel", "Ada Young"], ["Bob Moss"], ["Cleo Hale"]], "by": "last"}
    task = Task("", names)
    answers = ["Zoe Abel\nAda Young", "Zoe Abel\nBob Moss*\nAda Young", "Zoe Abel\nCleo Hale*\nBob Moss\nAda Young"]
    assert sorting(answers, task) == 1
    assert sorting(answers, Task("", {**names, "by": "first"})) < 0.5
    opening = environment("alphabet_sort").reset(task, 0).messages[0]["content"]
    assert "by last name" in opening
    assert opening.endswith("Zoe Abel\nAda Young")


def test_names_of_two_parts_need_the_rules() -> None:
    with pytest.raises(Exception, match="rules = true"):
        environment("alphabet_sort", rules=False)


@pytest.mark.parametrize(
    ("guess", "secret", "found"),
    [
        ("crane", "crane", "+++++"),
        ("cubit", "lemon", "-----"),
        ("speed", "erase", "?-??-"),
        ("geese", "erase", "-?-++"),
        ("allow", "llama", "?+?--"),
        ("llama", "allow", "?+?--"),
    ],
)
def test_a_letter_is_marked_as_often_as_the_word_has_it(guess: str, secret: str, found: str) -> None:
    assert load_attribute(f"{EXAMPLES / 'wordle/env.py'}:marks", "marks")(guess, secret) == found


def played(*replies: str, first: str = "", **arguments: Any) -> list[Turn]:
    episode = environment("wordle", **arguments).reset(Task("", {"secret": "crane", "first": first}), 0)
    return [episode.step(reply) for reply in replies]


def test_a_word_is_worth_more_the_sooner_it_is_found() -> None:
    rewards = [played(*["[lemon]"] * before, "I say [Crane]")[-1].reward for before in range(6)]
    assert rewards == sorted(rewards, reverse=True)
    assert (rewards[0], round(rewards[-1], 3)) == (1, 0.583)
    (turn,) = played("[crane]", first="lemon")
    assert turn.done
    assert turn.reward == rewards[1], "a guess that is given counts"


def test_a_game_that_the_run_ends_earns_its_share() -> None:
    game = environment("wordle").reset(Task("", {"secret": "crane", "first": "cramp"}), 0)
    turn = game.step("I think [cra", last=True)
    assert (turn.done, turn.truncated, turn.reward) == (True, True, pytest.approx(0.4 * 3 / 5))


def test_a_game_that_ends_by_its_rules_in_the_last_turn_is_not_cut_off() -> None:
    game = environment("wordle").reset(Task("", {"secret": "crane", "first": "cramp"}), 0)
    turns = [game.step("[moist]", last=number == 4) for number in range(5)]
    assert (turns[-1].done, turns[-1].truncated) == (True, False)


def test_without_the_word_the_best_guess_earns_a_share() -> None:
    turns = played("[cramp]", *["[moist]"] * 5)
    assert [turn.done for turn in turns] == [False] * 5 + [True]
    assert turns[-1].reward == pytest.approx(0.4 * 3 / 5)
    assert "square brackets" in played("crane")[0].messages[0]["content"]


def test_the_words_are_as_they_should_be() -> None:
    words = (EXAMPLES / "wordle/words.txt").read_text().split()
    assert len(words) == len(set(words)) > 500
    assert all(len(word) == 5 and word.isalpha() and word.islower() and word.isascii() for word in words)
