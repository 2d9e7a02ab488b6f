"""Refuse short waits in tests: `lint_waits.py [FILE ...]` prints each place where an outcome depends on how busy the machine is.

A literal under one second must not be a wait or a limit: an argument `..._s=` or `timeout=`, `sleep(...)`, `timeout(...)`, `wait_for(..., ...)`,
`timedelta(...)`, or a key `"..._s"` of a dict. Names of constants of the module are followed. Wait for an event instead, with a limit of at least ten times what a quiet
machine needs, or move a simulated clock.

Allowed are: 0; modules that import simulated_clock; tests marked `clock`; a sleep in a `while` loop, which polls until something happened; and
intervals between looks, which healthy work cannot miss.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parent
SHORTEST_S = 1.0
WAITS = {"sleep": 0, "timeout": 0, "wait_for": 1, "join": 0, "wait": 0}
"""Functions that wait or limit a wait, and the position of their seconds."""
INTERVALS = ("heartbeat_s", "poll_s", "pause_s", "report_s", "keepalive_s", "latency_s", "per_s")
"""Ends of names of settings and results that limit nothing: how often something is done, or what was measured."""
UNITS_S = {
    "days": 86400.0,
    "hours": 3600.0,
    "minutes": 60.0,
    "seconds": 1.0,
    "milliseconds": 1e-3,
    "microseconds": 1e-6,
}


class Waits(ast.NodeVisitor):
    """Collects the short waits of a module."""

    def __init__(self, module: ast.Module) -> None:
        self.found: list[tuple[int, str]] = []
        self._constants = _constants(module)
        self._polls = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if not _races(node.decorator_list):
            self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that ast calls

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not _races(node.decorator_list):
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._polls += 1
        self.generic_visit(node)
        self._polls -= 1

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name == "timedelta":
            self._look_at_timedelta(node)
        elif name in WAITS and len(node.args) > WAITS[name] and not (name in {"sleep", "wait"} and self._polls):
            self._look(node.args[WAITS[name]], name)
        for keyword in node.keywords:
            self._look_at_named(keyword.arg, keyword.value)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._look_at_named(key.value.rpartition(".")[2], value)
        self.generic_visit(node)

    def _look_at_named(self, name: str | None, value: ast.expr) -> None:
        limits = name is not None and (name == "timeout" or name.endswith("_s")) and "/" not in name
        if limits and not name.endswith(INTERVALS):
            self._look(value, name)

    def _look_at_timedelta(self, node: ast.Call) -> None:
        parts = [(UNITS_S.get(each.arg or "", 0.0), _number(each.value, self._constants)) for each in node.keywords]
        if parts and all(number is not None for _, number in parts):
            self._judge(node, "timedelta", sum(unit * (number or 0.0) for unit, number in parts))

    def _look(self, node: ast.expr, name: str) -> None:
        number = _number(node, self._constants)
        if number is not None:
            self._judge(node, name, number)

    def _judge(self, node: ast.expr, name: str, seconds: float) -> None:
        if 0 < seconds < SHORTEST_S:
            self.found.append((node.lineno, f"{name} of {seconds:g} s"))


def _number(node: ast.expr, constants: Mapping[str, float]) -> float | None:
    """Return the number that an expression stands for; None if only a run can tell."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        left, right = _number(node.left, constants), _number(node.right, constants)
        if left is not None and right is not None and not (isinstance(node.op, ast.Div) and right == 0):
            return _compute(node.op, left, right)
    return None


def _compute(operator: ast.operator, left: float, right: float) -> float:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    return left * right if isinstance(operator, ast.Mult) else left / right


def _constants(module: ast.Module) -> dict[str, float]:
    """Return the numbers that names stand for at the top of a module."""
    constants: dict[str, float] = {}
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            number = _number(node.value, constants)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if number is not None:
                constants |= {target.id: number for target in targets if isinstance(target, ast.Name)}
    return constants


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _races(decorators: list[ast.expr]) -> bool:
    """Whether a mark says that the test races real time."""
    return any("mark.clock" in ast.unparse(each) for each in decorators)


def short_waits(text: str) -> list[tuple[int, str]]:
    """Return line and description of each short wait in a module."""
    module = ast.parse(text)
    imports = [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.name for node in imports for name in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom) and node.module}
    marked = any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and _races([node.value])
        for node in module.body
    )
    if "simulated_clock" in names or marked:
        return []
    waits = Waits(module)
    waits.visit(module)
    return waits.found


def main(arguments: list[str]) -> int:
    """Look at the files, or at all tests; exit with 1 if there is a short wait."""
    files = [Path(each) for each in arguments] or sorted(TESTS.rglob("*.py"))
    found = [(file, *place) for file in files for place in short_waits(file.read_text())]
    for file, line, what in found:
        print(f"{file}:{line}: {what}: wait for an event, or move a simulated clock (tests/lint_waits.py)")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
