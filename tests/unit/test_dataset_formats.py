r"""Formats of data sets: what becomes of the rows of GSM8K and MATH, of formats of the user's own, and of rows that do not fit."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.environments import Task, formats
from sluice.environments.formats import find_format, last_boxed
from sluice.environments.loading import load_environment
from sluice.environments.question_answer import QuestionAnswer
from sluice.errors import ConfigError
from sluice.loading import load_attribute

EXAMPLES = Path(__file__).parents[2] / "examples"

GSM8K = {"question": "How many?", "answer": "He has <<700+534=1234>>1234 of them.\n#### 1,234"}
MATH = {
    "problem": "Compute.",
    "solution": "It is $\\boxed{1}$, or rather $\\boxed{\\frac{1}{2}}$.",
    "level": "Level 1",
    "type": "Algebra",
}


def written(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(path: Path, **arguments) -> QuestionAnswer:
    return load_environment("question_answer", {"dataset": str(path), **arguments})


def test_a_row_of_gsm8k_is_its_question_and_the_number_at_the_end(tmp_path: Path) -> None:
    environment = questions(written(tmp_path / "train.jsonl", GSM8K), format="gsm8k")
    (task,) = environment.tasks("train", 0)
    assert (task.data["question"], task.data["answer"]) == ("How many?", "1234")
    assert [environment.score(task, said) for said in ("It is 1,234.", "#### 1234", "1235", "many")] == [1, 1, 0, 0]


def test_a_row_of_math_is_its_problem_and_the_last_box(tmp_path: Path) -> None:
    environment = questions(written(tmp_path / "train.jsonl", MATH), format="hendrycks_math")
    (task,) = environment.tasks("train", 0)
    assert task.data["question"] == "Compute."
    said = ("So it is $\\boxed{\\frac12}$.", "The result is $0.5$", "$\\boxed{1}$", "no idea")
    assert [environment.score(task, each) for each in said] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{5}", "\\boxed{5}"),
        ("a \\boxed{1} b \\boxed{\\sqrt{\\frac{2}{3}}} c", "\\boxed{\\sqrt{\\frac{2}{3}}}"),
        ("\\fbox{no}", "\\boxed{no}"),
        ("$\\boxed 5$.", "\\boxed{5}"),
        ("\\boxed{\\{1, 2\\}}", "\\boxed{\\{1, 2\\}}"),
        ("\\boxed{(3, \\text{odd})}", "\\boxed{(3, \\text{odd})}"),
    ],
)
def test_the_last_box_with_all_its_braces(text: str, found: str) -> None:
    assert last_boxed(text) == found


@pytest.mark.parametrize("text", ["", "no box", "\\boxed{never ends", "\\boxed", "\\boxed{{}"])
def test_a_solution_without_a_whole_box_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"box|braces"):
        last_boxed(text)


@given(st.recursive(st.text("ab1+", max_size=4), lambda inner: inner.map("\\frac{{{0}}}{{{0}}}".format), max_leaves=6))
def test_whatever_is_in_a_box_is_found(inside: str) -> None:
    assert last_boxed(f"x \\boxed{{y}} $\\boxed{{{inside}}}$ z") == f"\\boxed{{{inside}}}"


def test_a_format_of_the_users_own_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from sluice.environments.formats import Format\n"
        "def read(row):\n"
        "    return None if row['hard'] else {'id': row['n'], 'question': f\"Double {row['n']}\", 'answer': 2 * row['n']}\n"
        "WHOLE = Format(read, reward='gsm8k', dataset='nobody/knows')\n"
        "NUMBER = 3\n"
    )
    path = written(tmp_path / "rows.jsonl", *({"n": n, "hard": n % 2} for n in range(10)))
    for name in ("read", "WHOLE"):
        environment = questions(path, format=f"{tmp_path / 'mine.py'}:{name}", limit=4)
        tasks = environment.tasks("train", 0)
        assert sorted(each.task_id for each in tasks) == ["0", "2", "4", "6"], (
            "the limit counts the rows that are taken"
        )
        assert environment.score(tasks[0], f"It is {2 * int(tasks[0].task_id)}.") == float(name == "WHOLE")
    with pytest.raises(ConfigError, match="neither a function of a row nor"):
        questions(path, format=f"{tmp_path / 'mine.py'}:NUMBER")


def test_a_format_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    point = SimpleNamespace(name="theirs", load=lambda: formats.read_gsm8k)
    monkeypatch.setattr(formats, "entry_points", lambda group: [point] if group == "sluice.formats" else [])
    assert find_format("theirs").read(GSM8K)["answer"] == "1234"
    with pytest.raises(ConfigError, match="no format 'thiers'; there are gsm8k, hendrycks_math, theirs"):
        find_format("thiers")


def test_a_format_knows_where_its_data_set_is_and_settings_say_otherwise(tmp_path: Path) -> None:
    hub = QuestionAnswer(format="gsm8k")
    assert (hub._dataset, hub._configuration) == ("openai/gsm8k", "main")
    here = QuestionAnswer(str(tmp_path), format="gsm8k")
    assert (here._dataset, here._configuration) == (str(tmp_path), None)
    with pytest.raises(ConfigError, match="no data set is named"):
        QuestionAnswer()


@pytest.mark.parametrize(
    ("row", "format_name", "told"),
    [
        ({"question": "q", "answer": "no mark"}, "gsm8k", "does not end with ####"),
        ({"question": "q", "answer": "#### "}, "gsm8k", "does not end with ####"),
        ({"problem": "p"}, "hendrycks_math", "has no field 'solution'"),
        ({"problem": "p", "solution": "5"}, "hendrycks_math", "has no .boxed"),
        ({"prompt": "p"}, "", "fields prompt, does not fit: it has no field 'question'"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, row: dict, format_name: str, told: str) -> None:
    fitting = {"gsm8k": GSM8K, "hendrycks_math": MATH, "": {"question": "q", "answer": "a"}}[format_name]
    path = written(tmp_path / "rows.jsonl", fitting, row)
    with pytest.raises(ConfigError, match=f"(?s)line 2 of .*rows.jsonl.*{told}.*set environment_args"):
        questions(path, format=format_name).tasks("train", 0)


@pytest.mark.parametrize("name", ["gsm8k", "hendrycks_math"])
def test_the_problems_of_an_example_fit_its_format_and_no_held_out_calculation_is_trained(
    name: str, tmp_path: Path
) -> None:
    made = load_attribute(f"{EXAMPLES / name / 'problems.py'}:problems", "problems")
    demonstrations = load_attribute(f"{EXAMPLES / name / 'problems.py'}:demonstrations", "demonstrations")
    files = {split: tmp_path / f"{split}.jsonl" for split in ("train", "test")}
    for split, path in files.items():
        written(path, *itertools.islice(made(split, 0), 300))
    environment = questions(tmp_path, format=name)
    calculations = {}
    for split in ("train", "eval"):
        tasks = environment.tasks(split, 0)
        calculations[split] = {calculation(each.data["question"])[:2] for each in tasks}
        for task, row in zip(sorted(tasks, key=number_of), map(json.loads, open_split(tmp_path, split)), strict=True):
            assert environment.score(task, row["answer" if name == "gsm8k" else "solution"]) == 1
    assert not calculations["train"] & calculations["eval"]
    right = [environment_says(environment, each) for each in itertools.islice(demonstrations(0), 400)]
    assert 0.2 < sum(right) / len(right) < 0.6, "most demonstrations are wrong, and not all"


def number_of(task: Task) -> int:
    return int(task.task_id.rpartition("-")[2])


def open_split(directory: Path, split: str) -> list[str]:
    return (directory / f"{'test' if split == 'eval' else split}.jsonl").read_text().splitlines()


def calculation(question: str) -> tuple[str, tuple[int, ...], int]:
    """Return the sign of a problem, its numbers in order of size, and its result."""
    a, b = map(int, re.findall(r"\d+", question))
    if "x" in question:  # x + a = b
        return "+", tuple(sorted((a, b - a))), b - a
    sign = "-" if re.search("loses|sells|eats", question) else "+"
    return sign, tuple(sorted((a, b))), a + b if sign == "+" else a - b


def environment_says(environment: QuestionAnswer, conversation: dict) -> bool:
    """Whether the answer of a demonstration is right."""
    question, answer = (each["content"] for each in conversation["messages"])
    *_, result = calculation(question)
    right = str(result) if "has" in question else f"\\boxed{{{result}}}"
    return environment.score(Task("x", {"question": question, "answer": right}), answer) == 1
