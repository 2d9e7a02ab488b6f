"""What failed is run once more: a test that passes then is reported as flaky, one that fails twice makes the suite red."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_suite
from run_suite import may_select

PROGRAM = Path(__file__).parents[1] / "run_suite.py"

HEALTHY = "def test_healthy(): pass\n"
BROKEN = "def test_broken(): assert 1 + 1 == 3\n"
FLAKY = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range({count}))
def test_flaky(number):
    seen = pathlib.Path(f"seen{{number}}")
    first = not seen.exists()
    seen.touch()
    assert not first, "the first try"
"""
ALONE = """
import os, pathlib
def test_alone():
    assert "PYTEST_XDIST_WORKER" not in os.environ, "beside others"
"""


HOOK = f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\nfrom run_suite import pytest_ignore_collect\n"


def run(directory: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # ours take a second to import
    plugins = ("-p", "pytest_reportlog.plugin", "-p", "xdist", "-p", "no:cacheprovider")
    return subprocess.run(
        [sys.executable, str(PROGRAM), "not left_out", str(directory), "--", *plugins, *options],
        cwd=directory,
        env={**environment, "FLAKY_REPORT": str(directory / "flaky.txt")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_suite_without_failures_is_green(tmp_path: Path) -> None:
    done = run(tmp_path, healthy=HEALTHY)
    assert done.returncode == 0
    assert "1 passed" in done.stdout
    assert not (tmp_path / "flaky.txt").exists()


@pytest.mark.slow
def test_what_passes_the_second_time_is_reported_with_its_first_error(tmp_path: Path) -> None:
    done = run(tmp_path, healthy=HEALTHY, flaky=FLAKY.format(count=1))
    assert done.returncode == 0
    report = (tmp_path / "flaky.txt").read_text()
    assert report.startswith("flaky: test_flaky.py::test_flaky[0]\n")
    assert "the first try" in report
    assert done.stdout.endswith(report)


@pytest.mark.slow
def test_what_fails_twice_is_red(tmp_path: Path) -> None:
    done = run(tmp_path, broken=BROKEN, flaky=FLAKY.format(count=1))
    assert done.returncode == 1
    assert "failed twice: test_broken.py::test_broken\n" in done.stdout
    assert "test_broken" not in (tmp_path / "flaky.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "code"), [(5, 0), (6, 1)])
def test_more_than_five_failures_are_red_even_if_they_would_pass(tmp_path: Path, count: int, code: int) -> None:
    assert run(tmp_path, flaky=FLAKY.format(count=count)).returncode == code


@pytest.mark.slow
def test_the_second_attempt_runs_without_workers(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "--dist", "loadfile", alone=ALONE)
    assert done.returncode == 0
    assert "beside others" in (tmp_path / "flaky.txt").read_text()


@pytest.mark.slow
def test_tests_that_race_the_clock_run_without_workers(tmp_path: Path) -> None:
    marked = ALONE.replace("def ", "@pytest.mark.clock\ndef ").replace("import os", "import pytest, os")
    done = run(tmp_path, "-n", "2", healthy=HEALTHY, alone=marked)
    assert done.returncode == 0
    assert done.stdout.count("1 passed") == 2
    assert not (tmp_path / "flaky.txt").exists()


def test_only_what_is_selected_runs(tmp_path: Path) -> None:
    left_out = "import pytest\n@pytest.mark.left_out\n" + BROKEN
    assert run(tmp_path, healthy=HEALTHY, broken=left_out).returncode == 0


def test_a_file_whose_marks_leave_out_all_of_its_tests_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(HOOK)
    unfit = "import pytest, no_such_module\npytestmark = [pytest.mark.slow, pytest.mark.left_out]\n" + BROKEN
    assert run(tmp_path, healthy=HEALTHY, unfit=unfit).returncode == 0


@pytest.mark.parametrize(
    ("marks", "text", "selects"),
    [
        ("wanted and not left_out", "pytestmark = mark.wanted", True),
        ("wanted and not left_out", "pytestmark = [mark.wanted, mark.left_out]", False),
        ("wanted and not left_out", "pytestmark = mark.wanted\n@mark.left_out\ndef test(): pass", True),
        ("wanted and not left_out", "@mark.wanted\ndef test(): pass", True),
        ("wanted and not left_out", "def test(): pass", False),
        ("not (left_out or other)", "@mark.left_out\ndef test(): pass", True),
        ("not (left_out or other)", "def test(): pass", True),
        ("not left_out", "def broken(", True),
    ],
)
def test_files_that_may_have_a_selected_test_are_known_by_their_text(marks: str, text: str, selects: bool) -> None:
    assert may_select(marks, text) == selects


def test_marks_that_select_tests_are_written_in_test_files() -> None:
    helpers = (path for path in PROGRAM.parent.rglob("*.py") if not path.name.startswith("test_") and path != PROGRAM)
    marks = re.compile(r"pytest\.mark\.(slow|gpu|docker|soak|examples|clock|fuzz|ecosystem)")
    assert not [path for path in helpers if marks.search(path.read_text())]


@pytest.mark.slow
def test_a_suite_without_tests_of_one_kind_is_green(tmp_path: Path) -> None:
    assert run(tmp_path, alone="import pytest\n@pytest.mark.clock\n" + HEALTHY).returncode == 0


def test_a_file_that_cannot_be_imported_is_red(tmp_path: Path) -> None:
    assert run(tmp_path, healthy=HEALTHY, broken="import no_such_module").returncode != 0


@pytest.mark.slow
def test_a_worker_that_dies_is_red(tmp_path: Path) -> None:
    files = {f"healthy{number}": HEALTHY for number in range(6)}
    dies_once = FLAKY.format(count=1).replace('assert not first, "the first try"', "first and os._exit(1)")
    done = run(tmp_path, "-n", "2", "--dist", "loadfile", dies=dies_once, **files)
    assert done.returncode == 1
    died = "a worker process died, and the tests after that did not run: test_dies.py::test_flaky[0]\n"
    assert done.stdout.endswith(died)


@pytest.mark.slow
def test_a_suite_that_does_not_end_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(run_suite, "LONGEST_S", 5.0)
    (tmp_path / "test_waits.py").write_text("import threading\ndef test_waits(): threading.Event().wait()\n")
    options = ["-p", "no:cacheprovider", "-p", "no:timeout"]
    assert run_suite.run_suite("not left_out", [str(tmp_path)], options, tmp_path) == run_suite.TOO_LONG
    assert "pytest has not ended after 5 s" in capfd.readouterr().out


def test_wrong_options_are_red(tmp_path: Path) -> None:
    assert run(tmp_path, "--no-such-option", healthy=HEALTHY).returncode not in {0, 1}
