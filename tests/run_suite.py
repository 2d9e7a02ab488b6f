"""Run pytest. Run what failed once more, alone, and report what passes then as flaky: `run_suite.py MARKS PATH ... -- PYTEST_OPTIONS`.

MARKS selects tests as `pytest -m` does. Those marked `clock` run at the end, one after another, since they race real time.

With the hook of this module, pytest leaves out the files that have no test of the marks: each worker would import them, and what they
import, to find that.
The suite is red if a test fails twice, or if more than MAX_FLAKY tests failed at all: then something is broken, and not only unlucky.
It is red, too, if a worker process dies, since the tests after that do not run: pytest-xdist 3.8 can wait for ever with a new worker
(pytest-xdist#1323, #1327). And if pytest has not ended after LONGEST_S.
Flaky tests and their first errors are printed at the end, and appended to the file that FLAKY_REPORT names.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

MAX_FLAKY = 5
LONGEST_S = 3000.0
"""Seconds for one run of pytest: half as long again as the longest takes beside two busy loops."""
END_S = 30.0
"""Seconds for pytest to end once it is asked to."""
MAX_LINES, MAX_COLUMNS = 8, 400
"""Of the error of a flaky test."""
TESTS_FAILED = 1
NO_TESTS = 5
"""Exit codes of pytest if tests ran and some failed, and if none was selected. Others are errors of pytest or of its options."""
TOO_LONG = 124
"""Exit code of a run that did not end in time."""


@dataclass
class Outcomes:
    """What a run of pytest reported.

    Attributes:
        errors: The first error of each test that failed, by node id. An error outside of tests has the node id of its file.
        passed: Node ids of tests whose body passed.
    """

    errors: dict[str, str] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)

    @property
    def killers(self) -> list[str]:
        """Return the node ids of tests in which a worker process died."""
        return [test for test, error in self.errors.items() if re.match(r"worker '\w+' crashed while running", error)]


def read_outcomes(log: Path) -> Outcomes:
    """Read the log of pytest-reportlog."""
    outcomes = Outcomes()
    for line in log.read_text().splitlines():
        report = json.loads(line)
        if report.get("outcome") == "failed":
            outcomes.errors.setdefault(report["nodeid"], _error(report.get("longrepr")))
        elif report.get("outcome") == "passed" and report.get("when") == "call":
            outcomes.passed.add(report["nodeid"])
    outcomes.passed -= outcomes.errors.keys()
    return outcomes


def _error(longrepr: object) -> str:
    """Return the lines of a report that say what went wrong."""
    if isinstance(longrepr, dict):
        crash = longrepr.get("reprcrash")
        return f"{crash['path']}:{crash['lineno']}: {crash['message']}" if crash else str(longrepr.get("longrepr", ""))
    return str(longrepr)


def run_pytest(paths: list[str], options: list[str], log: Path) -> int:
    """Run pytest in a process of its own; return its exit code, TOO_LONG if it does not end in time."""
    command = [sys.executable, "-m", "pytest", "--max-worker-restart=0", *options, f"--report-log={log}", *paths]
    with subprocess.Popen(command) as running:
        try:
            return running.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            print(f"pytest has not ended after {LONGEST_S:g} s; its last tests are in the output above", flush=True)
            running.terminate()
            try:
                running.wait(END_S)
            except subprocess.TimeoutExpired:
                running.kill()
            return TOO_LONG


def run_suite(marks: str, paths: list[str], options: list[str], directory: Path) -> int:
    """Run the tests of `paths` that `marks` selects, and what failed once more; return the exit code for the suite."""
    failed: dict[str, str] = {}
    alone = [*options, "--numprocesses=0"]
    racing = files_with(f"({marks}) and clock", paths)
    for name, files, selected, how in (("beside", paths, "not clock", options), ("alone", racing, "clock", alone)):
        log = directory / f"{name}.jsonl"
        code = run_pytest(files, [*how, "-m", f"({marks}) and {selected}"], log) if files else 0
        if code not in {0, TESTS_FAILED, NO_TESTS}:
            return code
        outcomes = read_outcomes(log) if log.exists() else Outcomes()
        if outcomes.killers:
            print(f"a worker process died, and the tests after that did not run: {', '.join(outcomes.killers)}")
            return TESTS_FAILED
        failed |= outcomes.errors
    if not failed:
        return 0
    if len(failed) > MAX_FLAKY:
        print(f"{len(failed)} tests failed; up to {MAX_FLAKY} are run once more")
        return TESTS_FAILED
    print(f"{len(failed)} tests failed; each is run once more, alone", flush=True)
    again = directory / "again.jsonl"
    run_pytest(sorted(failed), alone, again)
    passed = read_outcomes(again).passed if again.exists() else set()
    report_flaky({test: error for test, error in failed.items() if test in passed})
    twice = sorted(failed.keys() - passed)
    for test in twice:
        print(f"failed twice: {test}")
    return TESTS_FAILED if twice else 0


class Config(Protocol):
    """What the hook needs of pytest's configuration."""

    def getoption(self, name: str) -> str:
        """Return the value of an option."""
        ...


def pytest_ignore_collect(collection_path: Path, config: Config) -> bool | None:
    """Leave out a file without a test that the option `-m` selects."""
    marks = config.getoption("markexpr")
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if marks and is_test and not may_select(marks, collection_path.read_text()) else None


def files_with(marks: str, paths: list[str]) -> list[str]:
    """Return the test files that may have a test which `marks` selects."""
    files = (file for path in map(Path, paths) for file in ([path] if path.is_file() else path.rglob("test_*.py")))
    return sorted(str(file) for file in files if may_select(marks, file.read_text()))


def may_select(marks: str, text: str) -> bool:
    """Return whether `marks` can select a test of a file: all have the marks of `pytestmark`, and may have any other that it names."""
    names = set(re.findall(r"\w+", marks)) - {"and", "or", "not"}
    of_module = re.search(r"^pytestmark = (\[[^\]]*\]|.*)", text, re.MULTILINE)
    given = names & set(re.findall(r"mark\.(\w+)", of_module[1])) if of_module else set()
    possible = sorted(name for name in names - given if f"mark.{name}" in text)
    return any(
        eval(marks, {"__builtins__": {}}, dict.fromkeys(names, False) | dict.fromkeys({*given, *some}, True))
        for count in range(len(possible) + 1)
        for some in itertools.combinations(possible, count)
    )


def shortened(error: str) -> str:
    """Return the lines of an error that fit into a report."""
    lines = error.strip().splitlines()
    left_out = [f"... {len(lines) - MAX_LINES} lines"] if len(lines) > MAX_LINES else []
    return "\n".join(f"    {line[:MAX_COLUMNS]}" for line in [*lines[:MAX_LINES], *left_out])


def report_flaky(flaky: dict[str, str]) -> None:
    """Print the tests that passed at the second attempt, and append them to the file that CI prints at its end."""
    text = "".join(f"flaky: {test}\n{shortened(error)}\n" for test, error in flaky.items())
    print(text, end="", flush=True)
    if text and (path := os.environ.get("FLAKY_REPORT")):
        with Path(path).open("a") as file:
            file.write(text)


def main(arguments: list[str]) -> int:
    """Split the arguments at `--`, and run the suite."""
    split = arguments.index("--")
    with tempfile.TemporaryDirectory() as directory:
        return run_suite(arguments[0], arguments[1:split], arguments[split + 1 :], Path(directory))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
