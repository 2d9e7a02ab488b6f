"""What reward functions may return, in TRL's form, in verl's, and for `question_answer`: taken as what it is, or refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sluice.environments.base import Score, Task
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.libraries.trl import Rewards
from sluice.environments.libraries.verl import Rows, compare, load
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.question_answer import load as load_questions
from sluice.errors import ConfigError

NAN, INF = float("nan"), float("inf")


async def later(value: object) -> object:
    return value


def trl(*values: Any) -> Score:
    """Return what functions that return these values give for one completion; a callable is the function itself."""
    functions = {
        f"mine.py:{'abcd'[place]}": value if callable(value) else lambda _value=value, **_: _value
        for place, value in enumerate(values)
    }
    (score,) = asyncio.run(Rewards(functions, None).score(["p"], ["c"], {}))
    return score


async def coroutine(**_: object) -> list[float]:
    return [1.0]


@pytest.mark.parametrize(
    "found",
    [
        [1],
        [True],
        (1.0,),
        np.ones(1, dtype=np.float16),
        np.ones((1, 1)),
        [np.float32(1)],
        [np.bool_(True)],
        [np.array(1.0)],
        torch.ones(1),
        torch.ones(1, dtype=torch.bfloat16),
        [torch.tensor(1)],
        [Decimal(1)],
        [Fraction(1)],
        {1.0: "key"}.keys(),
        coroutine,
        lambda **_: (each for each in [1]),
        lambda **_: [later(1.0)],
        lambda **_: later([1.0]),
    ],
)
@pytest.mark.filterwarnings("ignore:Conversion of an array")
def test_numbers_of_every_library_are_rewards_in_trls_form(found: object) -> None:
    assert trl(found).reward == 1


@pytest.mark.parametrize("nothing", [[None], [NAN], [np.float64("nan")], [torch.tensor(NAN)], torch.tensor([NAN])])
def test_none_and_nan_abstain(nothing: object) -> None:
    assert trl([1.0], nothing) == Score(1.0, {"a": 1.0})
    assert trl(nothing, [0.5], [2]) == Score(2.5, {"b": 0.5, "c": 2.0})
    assert trl(nothing, nothing) == Score(None), "missing, which is not 0"


def test_each_completion_of_a_group_has_its_own_abstentions() -> None:
    functions = {"a": lambda **_: [1.0, NAN, None], "b": lambda **_: np.array([NAN, 2.0, NAN])}
    scores = asyncio.run(Rewards(functions, [1.0, 3.0]).score(["p"] * 3, ["c"] * 3, {}))
    assert [each.reward for each in scores] == [1.0, 6.0, None]


@pytest.mark.parametrize(
    ("found", "error", "said"),
    [
        ([[1.0]], TypeError, r"a reward of b is \[1.0\] \(list\), not a number"),
        (["1.0"], TypeError, r"a reward of b is '1.0' \(str\), not a number"),
        ([b"1"], TypeError, r"a reward of b is b'1' \(bytes\)"),
        ([{"score": 1.0}], TypeError, r"a reward of b is {'score': 1.0} \(dict\)"),
        ([(1.0, "why")], TypeError, r"a reward of b is \(1.0, 'why'\) \(tuple\)"),
        ([1j], TypeError, r"a reward of b is 1j \(complex\)"),
        (np.ones((1, 2)), TypeError, r"a reward of b is array\(.*\(ndarray\), not a number"),
        ([10**400], TypeError, "a reward of b is 1000"),
        ([INF], ValueError, "a reward of b is inf, not a finite number"),
        (torch.tensor([-INF]), ValueError, "a reward of b is -inf"),
        (None, ValueError, r"b returned None \(NoneType\) for 1 completions: return a list"),
        (1.0, ValueError, r"b returned 1.0 \(float\)"),
        (torch.tensor(1.0), ValueError, r"b returned tensor\(1.\) \(Tensor\)"),
        ("1", ValueError, r"b returned '1' \(str\)"),
        ({"a": 1.0}, ValueError, r"b returned {'a': 1.0} \(dict\)"),
        ([], ValueError, r"b returned \[\] \(list\)"),
        ([1.0, 2.0], ValueError, r"b returned \[1.0, 2.0\] \(list\) for 1 completions"),
    ],
)
def test_what_is_no_list_of_numbers_is_refused_with_the_functions_name(
    found: object, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        trl([1.0], found)


FAILING = """
def raises(completions=None, *_, **__): raise KeyError("answer")
def exits(completions=None, *_, **__): raise SystemExit(3)
"""

FUNCTIONS = """
import torch, numpy as np
from sluice.environments import Score

def scalar(completion, answer): return np.float32(0.5)
def tensor(completion, answer): return torch.tensor(0.5)
def score(completion, answer): return Score(0.5, {"length": 3})
async def coroutine(completion, answer): return 0.5
def missing(completion, answer): return None
def text(completion, answer): return "0.5"
def nested(completion, answer): return [0.5]
def nan(completion, answer): return float("nan")
def parts(completion, answer): return float(answer == ["a", 1])
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "failing.py").write_text(FAILING)
    row = {"prompt": "p", "question": "q", "answer": ["a", 1], "reward_model": {"ground_truth": "7"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return f"{tmp_path}/mine.py"


def processes(environment: str, functions: str, **arguments: object) -> EnvironmentProcesses:
    given = {"dataset": functions.replace("mine.py", "rows.jsonl"), **arguments}
    config = EnvironmentProcessesConfig(count=1, score_s=300.0, score_retries=0)
    return EnvironmentProcesses(environment, given, config, (300.0, "start_s"))


@pytest.mark.parametrize(
    ("environment", "arguments"),
    [("trl", {"reward_funcs": ["{}"]}), ("verl", {"reward": "{}"}), ("question_answer", {"reward": "{}"})],
)
async def test_an_exception_says_which_function_and_row_it_comes_from(
    functions: str, environment: str, arguments: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("raises", "exits"):
        located = f"{functions.replace('mine', 'failing')}:{name}"
        given = {key: located if isinstance(value, str) else [located] for key, value in arguments.items()}
        async with processes(environment, functions, **given) as asked:
            (task,) = await asked.tasks("train", 0)
            assert await asked.score(task, ["x", "y"]) == [None, None]
    printed = "".join(capfd.readouterr())
    for error, name in ((r"KeyError: \\?'answer\\?'", "raises"), ("SystemExit: 3", "exits")):
        assert re.search(rf"{error}; raised by the reward function \S*{name}; row train-0", printed)


@pytest.mark.parametrize("name", ["scalar", "tensor", "score", "coroutine"])
def test_functions_of_questions_and_answers_may_return_numbers_of_every_library(functions: str, name: str) -> None:
    questions = load_questions(functions.replace("mine.py", "rows.jsonl"), reward=f"{functions}:{name}")
    found: Any = questions.score(Task("t", {"question": "q", "answer": "a"}), "x")
    found = asyncio.run(found) if asyncio.iscoroutine(found) else found
    assert found == (Score(0.5, {"length": 3}) if name == "score" else 0.5)


def test_functions_of_questions_and_answers_may_abstain_and_get_answers_as_they_are(functions: str) -> None:
    def said(name: str) -> Any:
        questions = load_questions(functions.replace("mine.py", "rows.jsonl"), reward=f"{functions}:{name}")
        (task,) = questions.tasks("train", 0)
        return questions.score(task, "x")

    assert said("missing") is None
    assert said("parts") == 1
    for name, error, why in (
        ("text", TypeError, "'0.5'"),
        ("nested", TypeError, r"\[0.5\]"),
        ("nan", ValueError, "nan"),
    ):
        with pytest.raises(error, match=f"what the reward .*mine.py:{name} returned is {why}"):
            said(name)


def verl(found: object, **row: object) -> Score:
    rows = Rows(train=[], evaluated=[], function=found if callable(found) else lambda **_: found, more={}, prompt="prompt", source="s", system="", limit=None)  # fmt: skip
    return asyncio.run(rows.score(Task("train-3", {"row": {"reward_model": {"ground_truth": "7"}, **row}}), "c"))


@pytest.mark.parametrize(
    ("found", "score"),
    [
        (1, Score(1.0)),
        (True, Score(1.0)),
        (np.float32(1), Score(1.0)),
        (torch.tensor(1.0), Score(1.0)),
        (None, Score(None)),
        (lambda **_: later(1.0), Score(1.0)),
        (
            {"score": np.float32(1), "acc": np.bool_(True), "length": np.int64(7), "pred": None, "note": "text"},
            Score(1.0, {"acc": 1.0, "length": 7.0}),
        ),
        ({"score": torch.tensor(0.5), "part": torch.tensor(2), "none": NAN, "more": [1]}, Score(0.5, {"part": 2.0})),
        ({"score": None, "acc": 1}, Score(None, {"acc": 1.0})),
    ],
)
def test_numbers_of_every_library_are_rewards_and_measures_in_verls_form(found: object, score: Score) -> None:
    assert verl(found) == score


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"acc": 1.0}, 'for row train-3 returned a dict without "score", but with acc'),
        (
            (True, {"why": "exact"}),
            r"for row train-3 returned \(True, {'why': 'exact'}\): return a number, or a dict with \"score\"",
        ),
        ([1.0], "return a number, or a dict"),
        ("1.0", r"for row train-3 returned is '1.0' \(str\), not a number"),
        (NAN, "returned is nan, not a finite number"),
        ({"score": INF}, "the score of .* for row train-3 is inf"),
        ({"score": "1"}, "the score of .* is '1'"),
        ({"score": 1, "acc": np.ones(3)}, "the measure acc of .* not a number"),
    ],
)
def test_what_is_no_number_is_refused_in_verls_form(found: object, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        verl(found)


@pytest.mark.parametrize(
    ("source", "truth", "completion", "reward"),
    [
        ("math", 7, r"\boxed{7}", 1),
        ("openai/gsm8k", 7.0, "7", 1),
        ("openai/gsm8k", "7/2", "3.5", 1),
        ("openai/gsm8k", "7/2", "7", 0),
    ],
)
def test_ground_truths_that_are_numbers_are_compared(
    source: str, truth: object, completion: str, reward: float
) -> None:
    assert compare(source, completion, truth) == reward


@pytest.mark.parametrize(
    ("source", "truth", "said"),
    [
        ("openai/gsm8k", "seven", "does not end with #### and a number"),
        ("openai/gsm8k", None, "ground_truth is None, not a text or a number"),
        ("math", ["7"], r"ground_truth is \['7'\]"),
        ("math", True, "ground_truth is True"),
        ("math", " ", "is empty"),
        ("apps", "7", "no reward for the data source 'apps'"),
    ],
)
def test_a_ground_truth_that_cannot_be_compared_ends_the_start_with_its_row(
    tmp_path: Path, source: str, truth: object, said: str
) -> None:
    fitting = {"prompt": "p", "data_source": "math", "reward_model": {"ground_truth": "1"}}
    row = {"prompt": "p", "data_source": source, "reward_model": {"ground_truth": truth}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(fitting)}\n\n{json.dumps(row)}\n")
    with pytest.raises(ConfigError, match=f"line 3 of .*rows.jsonl does not fit: .*{said}.*path.py:compute_score"):
        load(str(tmp_path / "rows.jsonl")).tasks("train", 0)
