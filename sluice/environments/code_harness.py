"""Runs a program and then its tests, in the sandbox: `rewards.py` sends this file there, followed by a call of `main`.

Standard library only. The result of the tests or calls is printed after a mark that the program does not know.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_ASSERTED = "__asserted__"


def main(asked: dict[str, Any]) -> None:
    """Run what `asked` names: ``checker`` with its arguments, ``calls`` of a function, or a ``script``."""
    say, mark = os.write, asked.pop("mark")
    given = {name: asked.pop(name) for name in ("checker", "calls", "script") if name in asked}
    program = _run(asked["program"])
    if "calls" in given:
        found: object = _returned(program, given["calls"])
    elif "checker" in given:
        found = _checked(program, given["checker"])
    else:
        found = _tested(program, given["script"])
    sys.set_int_max_str_digits(0)
    said = json.dumps(found)
    sys.stdout.flush()
    text = f"\n{mark}{said}\n".encode()
    while text:
        text = text[say(1, text) :]


def _run(code: str) -> types.ModuleType:
    """Run code as the main module, which tests may also import as ``solution``."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["solution"] = module
    exec(compile(code, "<program>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - what this is for
    return module


def _returned(program: types.ModuleType, asked: dict[str, Any]) -> list[Any]:
    """Return the result of a function of the program for each list of arguments."""
    name, found = asked["function"], []
    for arguments in asked["arguments"]:
        owner = program if hasattr(program, name) else program.Solution()
        found.append(getattr(owner, name)(*arguments))
    return found


def _checked(checker: types.ModuleType, asked: list[Any]) -> object:
    """Return the checker's verdict on an output: True, False, or a text that says what is wrong with the checker."""
    try:
        said = checker.check(*asked)
    except Exception as error:  # noqa: BLE001 - foreign code
        return f"raised {type(error).__name__}: {error}"
    return bool(said) if type(said) in {bool, int} and said in {0, 1} else f"returned {said!r:.80}"


class _Counting(ast.NodeTransformer):
    """Makes each assertion count itself first, including assertions that are calls, such as ``numpy.testing.assert_allclose``."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return self._counted(node)

    def visit_Expr(self, node: ast.Expr) -> list[ast.stmt]:
        function = node.value.func if isinstance(node.value, ast.Call) else None
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return self._counted(node) if name.startswith("assert") else [node]

    @staticmethod
    def _counted(node: ast.stmt) -> list[ast.stmt]:
        return [ast.Expr(ast.Call(ast.Name(_ASSERTED, ast.Load()), [], [])), node]


def _tested(program: types.ModuleType, script: dict[str, Any]) -> int:
    """Run the tests of a script. Return how many assertions and tests ran."""
    ran = 0

    def count() -> None:
        nonlocal ran
        ran += 1

    space = program.__dict__
    sys.modules["pytest"] = _pytest(count)
    if script["cases"]:
        import unittest  # noqa: PLC0415 - slow to import

        unittest.main = lambda *_, **__: None  # type: ignore[assignment]  # they are run below
    space[_ASSERTED] = count
    tree = ast.fix_missing_locations(_Counting().visit(ast.parse(script["code"])))
    exec(compile(tree, "<tests>", "exec", dont_inherit=True), space)  # noqa: S102 - what this is for
    if script["candidate"]:
        space["check"](eval(script["candidate"], space))  # noqa: S307 - the name of a function
    for name in script["functions"]:
        _call(space, name)
        count()
    for name in script["cases"]:
        ran += _unittest(space[name])
    return ran


def _call(space: dict[str, Any], name: str) -> None:
    """Call a test function or a method of a test class, for each of its parameters if it has any."""
    kind, _, method = name.rpartition(".")
    for parameters in _products(getattr(getattr(space[kind], method) if kind else space[name], "parameters", ())):
        (getattr(space[kind](), method) if kind else space[name])(**parameters)


def _products(sets: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - foreign values
    if not sets:
        yield {}
        return
    for first in sets[0]:
        for rest in _products(sets[1:]):
            yield {**first, **rest}


def _unittest(case: Any) -> int:  # noqa: ANN401 - a class of the tests
    """Run a class of unittest; return how many of its tests ran."""
    import io  # noqa: PLC0415 - slow to import
    import unittest  # noqa: PLC0415

    result = unittest.TextTestRunner(io.StringIO()).run(unittest.TestLoader().loadTestsFromTestCase(case))
    if not result.wasSuccessful():
        raise AssertionError(f"{len(result.failures)} tests failed, {len(result.errors)} raised")
    return result.testsRun - len(result.skipped) - len(result.expectedFailures)


def _pytest(count: Callable[[], None]) -> types.ModuleType:
    """Return what there is of pytest: raises, approx and mark.parametrize."""

    def raises(expected: Any, *function: Any, match: str = "", **named: Any) -> _Raises:  # noqa: ANN401 - as pytest has it
        context = _Raises(count, expected, match)
        if function:
            with context:
                function[0](*function[1:], **named)
        return context

    module = types.ModuleType("pytest")
    mark = types.SimpleNamespace(parametrize=_parametrize)
    module.__dict__.update(raises=raises, approx=_Approx, mark=mark, main=lambda *_, **__: None)
    return module


class _Raises:
    """What `pytest.raises` returns; it counts as an assertion."""

    def __init__(self, count: Callable[[], None], expected: Any, match: str) -> None:  # noqa: ANN401 - one error or several
        self._count, self._expected, self._match = count, expected, match
        self.value: BaseException | None = None

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: object) -> bool:
        import re  # noqa: PLC0415 - slow to import

        if kind is None:
            raise AssertionError(f"did not raise {self._expected}")
        self._count()
        self.value = value
        if not issubclass(kind, self._expected):
            return False
        if self._match and not re.search(self._match, str(value)):
            raise AssertionError(f"{value} does not match {self._match}")
        return True


class _Approx:
    """What `pytest.approx` returns for numbers, lists, tuples and dicts."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:  # noqa: A002, ANN401 - as pytest has it
        self._expected, self._given = expected, (rel, abs)
        self._rel = rel if rel is not None else 0.0 if abs is not None else 1e-6
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, found: Any) -> bool:  # noqa: ANN401 - whatever was returned
        wanted = self._expected
        if isinstance(wanted, dict):
            names = isinstance(found, dict) and found.keys() == wanted.keys()
            return names and all(_Approx(each, *self._given) == found[name] for name, each in wanted.items())
        if isinstance(wanted, list | tuple):
            as_long = type(found) is type(wanted) and len(found) == len(wanted)
            return as_long and all(map(_Approx.__eq__, (_Approx(each, *self._given) for each in wanted), found))
        if not (isinstance(wanted, int | float) and isinstance(found, int | float)) or wanted == found:
            return bool(wanted == found)
        return abs(found - wanted) <= max(self._rel * abs(wanted), self._abs)


def _parametrize(names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:  # noqa: ANN401 - as pytest has it
    listed = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
    rows = [dict(zip(listed, each if len(listed) > 1 else [each], strict=True)) for each in values]

    def decorate(function: Any) -> Any:  # noqa: ANN401 - a function, which gets an attribute
        function.parameters = [*getattr(function, "parameters", ()), rows]
        return function

    return decorate
