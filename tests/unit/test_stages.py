"""Stages of a longer job, with real programs."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from sluice.cli.quickstart import StageError, Stages, run_quietly
from sluice.supervise.log_records import original


def test_a_stage_is_one_line_with_its_time_and_its_result() -> None:
    out = io.StringIO()
    stages = Stages(Console(file=out, width=120), count=2)
    with stages.stage("first", "do the first thing") as stage:
        stage.details.append("it went well")
    assert out.getvalue().startswith("[1/2] do the first thing  ")
    assert out.getvalue().endswith(" s  it went well\n")
    assert list(stages.seconds) == ["first"]


def test_a_stage_that_fails_prints_no_time() -> None:
    out = io.StringIO()
    stages = Stages(Console(file=out), count=1)
    with pytest.raises(StageError), stages.stage("first", "do the first thing"):
        raise StageError("no")
    assert (out.getvalue(), stages.seconds) == ("", {})


def test_the_last_line_of_a_program_is_returned_and_its_log_keeps_all(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.log"
    assert run_quietly(["-c", "print('one'); print('two')"], log, {}) == "two"
    assert [original(line) for line in log.read_text().splitlines()] == ["one", "two"]


def test_each_line_of_a_program_is_told_while_it_runs(tmp_path: Path) -> None:
    told: list[str] = []
    run_quietly(["-c", "print('one'); print('two')"], tmp_path / "x.log", {}, told.append)
    assert told == ["one", "two"]


def test_the_error_about_a_failed_program_quotes_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"exit code 7; .*x\.log ends with\n  \| the reason"):
        run_quietly(["-c", "import sys; print('the reason'); sys.exit(7)"], tmp_path / "x.log", {})


def test_a_signal_ends_the_program_and_raises_keyboard_interrupt(tmp_path: Path) -> None:
    code = "import os, signal, sys; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    with pytest.raises(KeyboardInterrupt):
        run_quietly(["-c", code], tmp_path / "x.log", {})
