"""Tests of programs, in the forms that data sets use. An unknown form is refused, since no program could pass it.

An answer is Python code, or JSON. docs/rewards.md lists the forms.
"""

from __future__ import annotations

import ast
import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

_PYTEST = {"raises", "approx", "mark", "main"}
"""Names of pytest that tests may use: `code_harness.py` stands in for pytest."""

_PROVIDED = {"pytest", "solution"}
"""Modules outside the standard library that tests may import. `solution` is the program."""

_STDIN, _STDOUT = ("input", "stdin", "inputs"), ("output", "stdout", "outputs")

_NEAR = 1e-9
"""Maximum difference between a number with a decimal point and the right one, as a share of the right one."""


class UnfitTestsError(ValueError):
    """An answer has no tests, or only tests of an unknown form."""


@dataclass(frozen=True)
class Cases:
    """Input and expected output of a program.

    Attributes:
        cases: Pairs of input and output. The output is None if only a checker can judge.
        checker: Code with a function ``check(stdin, stdout, expected)`` that says whether an output is right; "" compares texts.
    """

    cases: Sequence[tuple[str, str | None]]
    checker: str = ""


@dataclass(frozen=True)
class Calls:
    """Calls of a function of the program.

    Attributes:
        function: Its name; it may be a method of a class ``Solution``.
        calls: The arguments of each call, and the result that it must return, as JSON values.
        wrapped: Whether the result may also be in a list of one element, since data sets write both.
    """

    function: str
    calls: Sequence[tuple[Sequence[Any], Any]]
    wrapped: bool = False


@dataclass(frozen=True)
class Script:
    """Code with assertions, test functions or classes of unittest, which runs after the program.

    Attributes:
        code: The code.
        candidate: Expression for the argument of ``check(candidate)``; "" if there is no such function, or the code calls it.
        functions: Test functions of the code, and methods of its test classes as ``Class.method``.
        cases: Its classes of unittest.
        modules: Modules that it imports, except those of the standard library.
    """

    code: str
    candidate: str = ""
    functions: Sequence[str] = ()
    cases: Sequence[str] = ()
    modules: frozenset[str] = frozenset()


Tests: TypeAlias = Cases | Calls | Script


def read_tests(answer: str) -> Tests:
    """Return the tests in an answer.

    Raises:
        UnfitTestsError: if there are no tests, or only tests of an unknown form. The message says why.
    """
    if not answer.strip():
        raise UnfitTestsError("the answer is empty: it has no tests")
    try:
        found = json.loads(answer)
    except RecursionError as error:
        raise UnfitTestsError("its JSON is nested too deeply") from error
    except ValueError:
        return _script(answer)
    if isinstance(found, Mapping):
        return _object(found)
    if not isinstance(found, list):
        raise UnfitTestsError(f"the answer is {answer:.80}, which has no tests")
    if found and all(isinstance(each, str) for each in found):
        return _script("\n".join(found))
    return _cases(found)


def _object(found: Mapping[str, Any]) -> Tests:
    """Return the tests of a JSON object."""
    language = found.get("language") or "python"
    if not (isinstance(language, str) and language.lower().startswith("py")):
        raise UnfitTestsError(f"its programs are in {language!r}, and only Python is run")
    checker, cases = _checker(found.get("checker")), found.get("test_cases")
    if isinstance(code := found.get("test"), str):
        return _script(code, found.get("entry_point"))
    if cases is not None:
        if not isinstance(cases, list):
            raise UnfitTestsError(f"its test_cases are {cases!r:.80}: give a list")
        return _cases(cases, checker, found.get("fn_name"))
    inputs, outputs = _field(found, _STDIN), _field(found, _STDOUT)
    if not isinstance(inputs, list) or not (isinstance(outputs, list) or (outputs is None and checker)):
        raise UnfitTestsError(
            f"a JSON object with the fields {', '.join(found) or 'none'} is no form of tests that is known"
        )
    wanted = [None] * len(inputs) if outputs is None else outputs
    if len(inputs) != len(wanted):
        raise UnfitTestsError(f"it has {len(inputs)} inputs and {len(wanted)} outputs")
    return _pairs(list(zip(inputs, wanted, strict=True)), checker, found.get("fn_name"))


def _cases(found: Sequence[Any], checker: str = "", function: object = None) -> Tests:
    """Return the tests of a list of objects, one for each case."""
    pairs: list[tuple[Any, Any]] = []
    names = {function} if function else set()
    for number, case in enumerate(found, 1):
        if not isinstance(case, Mapping):
            raise UnfitTestsError(
                f"case {number} of {len(found)} is {case!r:.80}: give objects with input and output, or assertions alone"
            )
        kind = str(case.get("testtype", case.get("type", "")))
        name = case.get("fn_name")
        if kind.startswith("func") and not (name or function):
            raise UnfitTestsError(f"case {number} calls a function, and does not say which: give fn_name")
        if not any(each in case for each in _STDIN) or not (any(each in case for each in _STDOUT) or checker):
            raise UnfitTestsError(f"case {number} has the fields {', '.join(case) or 'none'}, not input and output")
        names |= {name} if name else set()
        pairs.append((_field(case, _STDIN), _field(case, _STDOUT)))
    if len(names) > 1:
        raise UnfitTestsError(f"its cases call several functions: {', '.join(map(repr, names))}")
    return _pairs(pairs, checker, next(iter(names), None))


def _field(found: Mapping[str, Any], names: Sequence[str]) -> Any:  # noqa: ANN401 - whatever JSON has
    return next((found[name] for name in names if found.get(name) is not None), None)


def _pairs(pairs: Sequence[tuple[Any, Any]], checker: str, function: object) -> Tests:
    """Return pairs of input and output as calls of a function if `function` names one, else as runs of the program."""
    if not pairs:
        raise UnfitTestsError("it has no test cases")
    if function is not None:
        if checker:
            raise UnfitTestsError("it has a checker and fn_name: a checker judges what programs print")
        if not (isinstance(function, str) and function.isidentifier()):
            raise UnfitTestsError(f"its fn_name is {function!r:.80}: give the name of a function")
        calls = [_call(number, *pair) for number, pair in enumerate(pairs, 1)]
        return Calls(function, calls, wrapped=all(isinstance(right, list) and len(right) == 1 for _, right in calls))
    cases = [
        (_lines(given, f"input {number}"), None if wanted is None and checker else _lines(wanted, f"output {number}"))
        for number, (given, wanted) in enumerate(pairs, 1)
    ]
    if not checker and not any((wanted or "").strip() for _, wanted in cases):
        raise UnfitTestsError("all its outputs are empty: a program that does nothing would pass")
    return Cases(cases, checker)


def _lines(value: object, what: str) -> str:
    """Return a text. It may be given as the list of its lines."""
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise UnfitTestsError(
            f"its {what} is {value!r:.80}: give the text that a program reads or prints, or fn_name if these are arguments of a function"
        )
    return value


def _call(number: int, given: object, wanted: object) -> tuple[Sequence[Any], Any]:
    """Return arguments and result of a call. If they are text, each line of the input is an argument in JSON, and the output is JSON."""
    if isinstance(given, list):
        return given, wanted
    if not isinstance(given, str) or not isinstance(wanted, str):
        raise UnfitTestsError(f"input {number} is {given!r:.80}: give the list of the arguments of the function")
    try:
        return [json.loads(line) for line in given.split("\n") if line.strip()], json.loads(wanted)
    except ValueError as error:
        raise UnfitTestsError(f"input or output {number} of a call is not JSON: {error}") from error


def same(found: Any, wanted: Any) -> bool:  # noqa: ANN401 - whatever JSON has
    """Return whether a result, read from JSON, is the right one. 6 is 6.0; True is not 1."""
    if isinstance(wanted, list) and isinstance(found, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, dict) and isinstance(found, dict):
        return found.keys() == wanted.keys() and all(same(found[name], value) for name, value in wanted.items())
    if {type(found), type(wanted)} == {int, float} or type(found) is type(wanted) is float:
        return math.isclose(found, wanted, rel_tol=_NEAR)
    return type(found) is type(wanted) and bool(found == wanted)


def _checker(code: object) -> str:
    """Return the code of a checker, which defines ``check(stdin, stdout, expected)``."""
    if not code:
        return ""
    tree = _parsed(code if isinstance(code, str) else "", "its checker")
    check = _defined(tree, "check")
    if check is None or len(check.args.args) != 3:
        raise UnfitTestsError("its checker must define check(stdin, stdout, expected), which returns True or False")
    return str(code)


def _parsed(code: str, what: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as warnings about escapes in its strings
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnfitTestsError(f"{what} is neither JSON nor Python: {error}") from error


def _script(code: str, entry_point: object = None) -> Script:
    """Return code with tests."""
    tree = _parsed(code, "the answer")
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
    cases = _unittests(classes)
    functions = [*_test_functions(tree.body)]
    for each in classes:
        if each.name.startswith("Test") and each.name not in cases:
            functions += _test_methods(each)
    if not any(map(_tests_something, ast.walk(tree))):
        raise UnfitTestsError(
            f"the answer is {code.strip()!r:.80}, which has no assertion and no test of unittest or pytest"
        )
    _check_pytest(tree)
    check = _defined(tree, "check")
    candidate = ""
    if check is not None and len(check.args.args) == 1 and not _called(tree, "check"):
        candidate = _entry_point(entry_point)
    return Script(code, candidate, functions, cases, _modules(tree))


def _defined(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    return next((each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def _called(tree: ast.Module, name: str) -> bool:
    """Return whether code calls a function anywhere outside of that function."""
    others = [each for each in tree.body if not (isinstance(each, ast.FunctionDef) and each.name == name)]
    inside = (node for each in others for node in ast.walk(each))
    return any(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == name for each in inside
    )


def _entry_point(given: object) -> str:
    """Return the expression for the tested function: a name, or a method as ``Solution().name``."""
    if not given:
        raise UnfitTestsError(
            "it defines check(candidate) and does not call it: the row needs a field entry_point with the function's name"
        )
    try:
        found: ast.AST = ast.parse(str(given), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise UnfitTestsError(f"its entry_point is {given!r:.80}: give a name, or Class().method") from error
    while isinstance(found, ast.Attribute | ast.Call):
        found = found.func if isinstance(found, ast.Call) else found.value
    if not isinstance(found, ast.Name):
        raise UnfitTestsError(f"its entry_point is {given!r:.80}: give a name, or Class().method")
    return str(given)


def _unittests(classes: Sequence[ast.ClassDef]) -> list[str]:
    """Return the classes that are tests of unittest, directly or through a base class in the same code."""
    found: list[str] = []
    for each in classes:
        bases = {
            base.id if isinstance(base, ast.Name) else base.attr
            for base in each.bases
            if isinstance(base, ast.Name | ast.Attribute)
        }
        if bases & {"TestCase", *found}:
            found.append(each.name)
    return found


def _test_functions(body: Sequence[ast.stmt], skipped: int = 0) -> Iterator[str]:
    """Yield the names of test functions.

    Raises:
        UnfitTestsError: if a function needs features that only pytest has.
    """
    for each in body:
        if not (isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test")):
            continue
        if isinstance(each, ast.AsyncFunctionDef):
            raise UnfitTestsError(f"its test {each.name} is a coroutine, which is not run")
        decorators = list(map(ast.unparse, each.decorator_list))
        other = [name for name in decorators if ".parametrize(" not in name]
        if other:
            raise UnfitTestsError(
                f"its test {each.name} has the decorator {other[0]:.80}; of pytest, only mark.parametrize is known"
            )
        arguments = each.args.args[skipped:]
        if len(arguments) > len(each.args.defaults) and not decorators:
            raise UnfitTestsError(
                f"its test {each.name} needs the fixtures {', '.join(one.arg for one in arguments)}, which are not known"
            )
        yield each.name


def _test_methods(found: ast.ClassDef) -> list[str]:
    """Return the test methods of a class by pytest's rules."""
    names = {each.name for each in found.body if isinstance(each, ast.FunctionDef)}
    if prepared := names & {"setup_method", "setup_class", "teardown_method", "teardown_class", "__init__"}:
        raise UnfitTestsError(
            f"its class {found.name} has {', '.join(sorted(prepared))}, which is not known: use unittest.TestCase"
        )
    return [f"{found.name}.{name}" for name in _test_functions(found.body, skipped=1)]


def _tests_something(node: ast.AST) -> bool:
    """Return whether a part of code is an assertion, including assertions of unittest, numpy or pytest."""
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.Assert)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name.startswith(("assert", "raises"))


def _check_pytest(tree: ast.Module) -> None:
    """Check that code uses only the supported part of pytest."""
    for node in ast.walk(tree):
        used: Sequence[str] = ()
        if isinstance(node, ast.ImportFrom) and node.module == "pytest":
            used = [each.name for each in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest":
            used = [node.attr]
        elif (
            isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark" and node.attr != "parametrize"
        ):
            used = [f"mark.{node.attr}"]
        if other := set(used) - _PYTEST:
            raise UnfitTestsError(
                f"it uses pytest.{', '.join(sorted(other))}; of pytest, raises, approx and mark.parametrize are known"
            )


def _modules(tree: ast.Module) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or ".").partition(".")[0])
    return frozenset(found - sys.stdlib_module_names - _PROVIDED)
