"""Tests of programs in the forms that public data sets have: no wrong program passes one, and each right one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.environments.code_tests import Calls, Cases, Script, read_tests, same
from sluice.environments.question_answer import QuestionAnswer
from sluice.environments.rewards import CodeReward
from sluice.errors import ConfigError

CHECKER = "def check(stdin, stdout, expected):\n    return int(stdout) == 2 * int(stdin)\n"

ASSERTS = "assert double(3) == 6\nassert double(0) == 0\nassert double(-4) == -8"

UNITTEST = """
import unittest
from solution import double

class TestDouble(unittest.TestCase):
    def setUp(self):
        self.cases = [(3, 6), (0, 0), (-4, -8)]

    def test_values(self):
        for given, wanted in self.cases:
            self.assertEqual(double(given), wanted)

if __name__ == "__main__":
    unittest.main()
"""

PYTEST = """
import pytest
from pytest import approx
from solution import *

@pytest.mark.parametrize("given, wanted", [(3, 6), (0, 0)])
def test_values(given, wanted):
    assert double(given) == wanted

class TestMore:
    def test_negative(self):
        assert [double(-4) + 0.1] == approx([-7.9])

def test_refuses():
    with pytest.raises(TypeError):
        double()
"""

STDIN: dict[str, Any] = {
    "list of cases": [{"input": "3\n", "output": "6\n"}, {"input": "-4", "output": "-8"}],
    "list of cases, stdin and stdout": [
        {"stdin": "3\n", "stdout": "6\n", "type": "stdin_stdout"},
        {"stdin": "5\n", "stdout": "10\n"},
    ],
    "inputs and outputs": {"inputs": ["3\n", "-4\n"], "outputs": ["6\n", "-8\n"]},
    "inputs and outputs, as lists of lines": {"inputs": [["3"], ["-4", ""]], "outputs": [["6"], ["-8", ""]]},
    "test_cases": {
        "language": "python",
        "test_cases": [{"input": "3\n", "output": "6\n"}, {"input": "4", "output": "8"}],
    },
    "checker": {
        "inputs": ["3\n", "-4\n"],
        "checker": CHECKER.replace("int(stdout) == 2 * int(stdin)", "stdout.strip() == str(2 * int(stdin))"),
    },
    "checker with outputs": {"inputs": ["3\n", "-4\n"], "outputs": ["6\n", "-8\n"], "checker": CHECKER},
}
"""Forms whose programs read and print, by name."""

FUNCTION: dict[str, Any] = {
    "fn_name": {"fn_name": "double", "inputs": [[3], [0], [-4]], "outputs": [6, 0, -8]},
    "fn_name, results in lists": {"fn_name": "double", "inputs": [[3], [-4]], "outputs": [[6], [-8]]},
    "fn_name, texts": {"fn_name": "double", "inputs": ["3", "-4"], "outputs": ["6", "-8"]},
    "fn_name, list of cases": [
        {"type": "function_call", "fn_name": "double", "input": [each], "output": 2 * each} for each in (3, 4)
    ],
    "assertions": ASSERTS,
    "list of assertions": ASSERTS.splitlines(),
    "check(candidate)": {
        "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(-4) == -8\n",
        "entry_point": "double",
    },
    "check(candidate) that is called": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n\ncheck(double)",
    "unittest": UNITTEST,
    "pytest": PYTEST,
}
"""Forms that test a function."""

READ = "number = int(input())\n"
DEF = "def double(x):\n    "

MISTAKES: dict[
    str, dict[bool, tuple[str, str]]
] = {  # by whether programs define a function: a wrong one, and its right twin
    "another value": {
        True: (DEF + "return 2 * x + 1", DEF + "return 2 * x"),
        False: (READ + "print(2 * number + 1)", READ + "print(2 * number)"),
    },
    "the first case alone": {
        True: (DEF + "return 6", DEF + "return {3: 6}.get(x, x + x)"),
        False: (READ + "print(6)", READ + "print({3: 6}.get(number, number + number))"),
    },
    "nothing": {
        True: (DEF + "pass", "double = lambda x: 2 * x"),
        False: ("pass", "import sys\nsys.stdout.write(str(2 * int(sys.stdin.readline())) + '  \\r\\n\\n')"),
    },
    "an exception": {
        True: (
            DEF + "raise ValueError",
            DEF + "try:\n        raise ValueError\n    except ValueError:\n        return 2 * x",
        ),
        False: (
            READ + "print(2 * number)\nraise ValueError",
            READ + "try:\n    raise ValueError\nexcept ValueError:\n    print(2 * number)",
        ),
    },
    "another name": {
        True: ("def treble(x):\n    return 2 * x", "def treble(x):\n    return 2 * x\n\ndouble = treble"),
        False: ("print(2 * number)", "number = int(input())\nprint(2 * number)"),
    },
    "an end before the tests": {
        True: (
            "import os\n" + DEF + "return 5\nos._exit(0)",
            "import os\n" + DEF + "return 2 * x\nif not double:\n    os._exit(0)",
        ),
        False: (
            "import os\nos._exit(0)\nprint(2 * int(input()))",
            "import os\nprint(2 * int(input()), flush=True)\nos._exit(0)",
        ),
    },
    "SystemExit": {
        True: (
            DEF + "return 5\nraise SystemExit",
            DEF + "return 2 * x\ntry:\n    raise SystemExit\nexcept SystemExit:\n    pass",
        ),
        False: ("raise SystemExit", "print(2 * int(input()))\nraise SystemExit"),
    },
    "a call that ends the program": {
        True: (
            "import sys\n" + DEF + "sys.exit(0)",
            "import sys\n" + DEF + "return 2 * x if x is not None else sys.exit(0)",
        ),
        False: (
            "import sys\n" + READ + "sys.exit(2 * number)",
            "import sys\n" + READ + "print(2 * number)\nsys.exit(0)",
        ),
    },
    "a print for a result": {
        True: (DEF + "print(2 * x)", DEF + "print('x' * 99)\n    return 2 * x"),
        False: (
            READ + "import sys\nprint(2 * number, file=sys.stderr)",
            READ + "import sys\nprint('x', file=sys.stderr)\nprint(2 * number)",
        ),
    },
    "another type": {
        True: (DEF + "return str(2 * x)", DEF + "return int(str(2 * x))"),
        False: (READ + "print([2 * number])", READ + "print(*[2 * number])"),
    },
    "no Python": {
        True: ("int twice(int x) { return 2 * x; }", DEF + "return (\n        2\n        * x\n    )"),
        False: ("#include <stdio.h>", READ + "# include\nprint(number << 1)"),
    },
    "an empty text": {
        True: ("", "if __name__ == '__main__':\n    " + DEF.replace("\n", "\n    ") + "return 2 * x"),
        False: ("", "if __name__ == '__main__':\n    print(2 * int(input()))"),
    },
}

FORMS = {name: (answer, False) for name, answer in STDIN.items()} | {
    name: (answer, True) for name, answer in FUNCTION.items()
}

TABLE = [
    pytest.param(form, mistake, marks=() if column == row % len(MISTAKES) else pytest.mark.soak)
    for row, form in enumerate(FORMS)
    for column, mistake in enumerate(MISTAKES)
]


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward({"wall_s": 60.0, "cpu_s": 20.0})


@pytest.mark.slow
@pytest.mark.parametrize(("form", "mistake"), TABLE)
def test_a_wrong_program_gets_nothing_and_its_right_twin_all(reward: CodeReward, form: str, mistake: str) -> None:
    answer, is_function = FORMS[form]
    wrong, right = MISTAKES[mistake][is_function]
    text = answer if isinstance(answer, str) else json.dumps(answer)
    assert (reward(wrong, text), reward(f"So:\n```python\n{right}\n```\n", text)) == (0, 1)


UNKNOWN = [
    ("", "is empty"),
    ("[]", "no test cases"),
    ("{}", "fields none is no form"),
    ("null", "has no tests"),
    ("7", "has no tests"),
    ('"assert double(3) == 6"', "has no tests"),
    ("double the number", "neither JSON nor Python"),
    ("print(double(3))", "no assertion"),
    ("def test_it():\n    double(3)", "no assertion"),
    ("['assert double(3) == 6']", "no assertion"),
    ('["double(3)"]', "no assertion"),
    ('[{"input": 3, "output": 6}]', "input 1 is 3: give the text"),
    ('[{"input": "3"}]', "case 1 has the fields input, not input and output"),
    ('[{"input": "3", "output": ""}]', "a program that does nothing would pass"),
    ('[{"input": "3", "output": null}]', "output 1 is None"),
    ('[{"input": "[3]", "output": "6", "testtype": "functional"}]', "give fn_name"),
    ('[{"input": "3", "output": "6"}, "assert x"]', "case 2 of 2 is 'assert x'"),
    ('{"inputs": [], "outputs": []}', "no test cases"),
    ('{"inputs": ["3"], "outputs": ["6", "8"]}', "1 inputs and 2 outputs"),
    ('{"inputs": ["3"]}', "fields inputs is no form"),
    ('{"inputs": "3", "outputs": "6"}', "is no form"),
    ('{"fn_name": "a b", "inputs": [[3]], "outputs": [6]}', "give the name of a function"),
    ('{"fn_name": "f", "inputs": [3], "outputs": [6]}', "give the list of the arguments"),
    ('{"fn_name": "f", "inputs": ["x"], "outputs": ["6"]}', "is not JSON"),
    ('{"language": "cpp", "test_cases": [{"input": "3", "output": "6"}]}', "only Python is run"),
    ('{"inputs": ["3"], "checker": "def right(a): return True"}', "must define check"),
    ("def check(candidate):\n    assert candidate(3) == 6", "needs a field entry_point"),
    ('{"test": "def check(f):\\n    assert f(3) == 6", "entry_point": "import os"}', "give a name"),
    (
        "import pytest\n@pytest.fixture\ndef x(): return 3\ndef test_x(x):\n    assert double(x) == 6",
        "pytest.fixture|needs the fixtures",
    ),
    ("def test_x(capsys):\n    assert double(3) == 6", "needs the fixtures capsys"),
    ("async def test_x():\n    assert double(3) == 6", "is a coroutine"),
    ("import pytest\npytest.importorskip('x')\nassert double(3) == 6", "uses pytest.importorskip"),
    ("[" * 100_000, "neither JSON nor Python|too deeply"),
]


@pytest.mark.parametrize(("answer", "why"), UNKNOWN, ids=[each[:40] for each, _ in UNKNOWN])
def test_a_form_that_is_not_known_is_refused_and_no_program_passes_it(
    reward: CodeReward, answer: str, why: str
) -> None:
    for refuses in (reward.check, lambda text: reward("def double(x): return 2 * x", text)):
        with pytest.raises(ValueError, match=why):
            refuses(answer)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (
            '{"question": "a", "answer": "assert f()"}\n\n{"question": "b", "answer": []}\n',
            "line 3 of .*: field answer: .*no test cases",
        ),
        (
            '{"question": "a", "answer": null}\n',
            "line 1 of .*: field answer: it is null: give a text, a list or an object",
        ),
        ('{"question": "a", "answer": true}\n', "line 1 of .*: field answer: it is True"),
        ('{"question": "a", "answer": "def check(f):\\n    assert f()"}\n', "line 1 of .*entry_point"),
        (
            '{"question": "a", "answer": "import numpy\\nassert f()"}\n',
            "import numpy, which programs cannot import: .* limits.packages",
        ),
        ('{"question": null, "answer": "assert f()"}\n', "line 1 of .*: field question: it is null"),
        ('{"question": [], "answer": "assert f()"}\n', "line 1 of .*: field question: it is \\[\\]"),
    ],
)
def test_a_row_without_tests_ends_the_start_with_its_place(tmp_path: Path, rows: str, why: str) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    with pytest.raises(ConfigError, match=why):
        QuestionAnswer(str(tmp_path / "rows.jsonl"), reward="code").tasks("train", 0)


@pytest.mark.parametrize(
    ("reward", "answer", "why"),
    [
        ("exact", None, "it is null"),
        ("exact", ["abc", "x"], r"it is \['abc', 'x'\]: give a text or a number"),
        ("exact", True, "it is True"),
        ("exact", "  ", "empty"),
        ("math", "", "empty"),
        ("gsm8k", "many", "does not end with #### and a number"),
        ("exact", float("nan"), "it is nan"),
    ],
)
def test_an_answer_that_a_reward_cannot_compare_with_ends_the_start(
    tmp_path: Path, reward: str, answer: object, why: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "a", "answer": answer}))
    with pytest.raises(ConfigError, match=f"(?s)line 1 of .*field answer: .*{why}"):
        QuestionAnswer(str(tmp_path / "rows.jsonl"), reward=reward).tasks("train", 0)


@pytest.mark.parametrize(("answer", "said"), [(7, "7"), (7.0, "7"), (0.5, "0.5"), ("7.0", "7.0")])
def test_answers_that_are_numbers_are_compared_as_they_are_written(tmp_path: Path, answer: object, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "a", "answer": answer}))
    questions = QuestionAnswer(str(tmp_path / "rows.jsonl"))
    (task,) = questions.tasks("train", 0)
    assert questions.score(task, said) == 1


def test_tests_may_be_a_field_of_the_row_and_humaneval_names_its_function_in_another(tmp_path: Path) -> None:
    answers = [
        each if isinstance(each, str) else json.dumps(each)
        for each in (FUNCTION["fn_name"], FUNCTION["list of assertions"])
    ]
    rows: list[dict[str, Any]] = [{"question": "q", "answer": json.loads(each)} for each in answers]
    rows += [{"question": "q", "answer": each} for each in answers]
    check = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(3) == 6\n"
    rows.append({"question": "q", "answer": check, "entry_point": "Solution().double"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = QuestionAnswer(str(tmp_path / "rows.jsonl"), reward="code")
    tasks = sorted(questions.tasks("train", 0), key=lambda task: task.task_id)
    assert len(tasks) == 5
    method = "class Solution:\n    def double(self, x):\n        return 2 * x\n"
    assert questions.score(tasks[-1], method) == 1
    assert questions.score(tasks[-1], method.replace("2 *", "3 *")) == 0
    assert questions.score(tasks[0], method) == 1, "fn_name may be a method of Solution"


def test_what_the_data_or_the_checker_does_wrong_makes_the_reward_missing(reward: CodeReward) -> None:
    with pytest.raises(ValueError, match="none of the tests of a task ran"):
        reward("def double(x): return 2 * x", "def unused():\n    assert double(3) == 6")
    broken = {"inputs": ["3"], "outputs": ["6"], "checker": "def check(stdin, stdout, expected):\n    return None"}
    with pytest.raises(ValueError, match="the checker of a task returned None"):
        reward("print(6)", json.dumps(broken))
    strict = {"inputs": ["3"], "outputs": ["6"], "checker": CHECKER}
    assert reward("print('six')", json.dumps(strict)) == 0, (
        "the checker cannot read this output, and accepts the expected one"
    )


def test_an_assertion_may_be_a_call(reward: CodeReward) -> None:
    helper = "def assert_same(found, wanted):\n    if found != wanted:\n        raise ValueError\n"
    tests = f"{helper}for x in range(3):\n    assert_same(double(x), 2 * x)"
    assert [reward(f"def double(x): return {each}", tests) for each in ("x + x", "x")] == [1, 0]


def test_fields_that_are_null_are_absent_as_parquet_pads_them(reward: CodeReward) -> None:
    padded = {
        "language": None,
        "fn_name": None,
        "checker": None,
        "test": None,
        "inputs": ["3"],
        "outputs": ["6"],
        "input": None,
    }
    cases = [{"stdin": None, "input": "3", "output": "6", "stdout": None, "fn_name": None, "type": None}]
    for answer in (padded, cases):
        assert [reward(f"print({each} * int(input()))", json.dumps(answer)) for each in (2, 3)] == [1, 0]


def test_a_program_sees_neither_results_nor_expected_outputs_and_no_type_of_its_own_passes_for_a_number(
    reward: CodeReward,
) -> None:
    equal = (
        "class Same(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef double(x): return Same(1)"
    )
    assert reward(equal, json.dumps(FUNCTION["fn_name"])) == 0
    assert reward("def double(x): return x * 2.0", json.dumps(FUNCTION["fn_name"])) == 1, "6.0 is 6"
    assert reward("def double(x): return 10 ** 5000 + 0 * x", json.dumps(FUNCTION["fn_name"])) == 0
    shared = {"fn_name": "pair", "inputs": [[1]], "outputs": [[1, {"a": None}]]}
    assert reward("def pair(x): return x, {'a': None}", json.dumps(shared)) == 1, "a tuple is a list"


@pytest.mark.parametrize(
    ("found", "wanted", "right"),
    [
        (1, True, False),
        (True, True, True),
        (6, 6.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.3001, 0.3, False),
        ("6", 6, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, 0, False),
        (2**60, 2**60 + 1, False),
    ],
)
def test_results_are_compared_by_value_and_kind(found: object, wanted: object, right: bool) -> None:
    assert same(found, wanted) is right


def test_each_form_is_what_it_says() -> None:
    kinds = {
        name: type(read_tests(answer if isinstance(answer, str) else json.dumps(answer)))
        for name, (answer, _) in FORMS.items()
    }
    assert all(
        kind is (Calls if name.startswith("fn_name") else Script if name in FUNCTION else Cases)
        for name, kind in kinds.items()
    )
