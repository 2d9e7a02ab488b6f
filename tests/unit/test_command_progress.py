"""What a command shows while it works: nothing for two seconds, then plain lines, or bars on a terminal."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_clock import LIMIT_S, SimulatedClock

from sluice.progress import LINE_S, SILENT_S, Step, doing, write_lines


class Stream(io.StringIO):
    """Standard error that says when a text has been written to it."""

    def __init__(self, awaited: str, *, terminal: bool) -> None:
        super().__init__()
        self.awaited, self.terminal, self.came = awaited, terminal, threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.awaited in self.getvalue():
            self.came.set()
        return written


@pytest.mark.parametrize(
    ("total", "done", "seconds", "text"),
    [
        (None, 0, 3.0, "load the model: 0:00:03"),
        (None, 7, 65.0, "load the model: 7 rows, 0:01:05"),
        (1200, 0, 3.0, "load the model: 0 of 1,200 rows, 0:00:03"),
        (1200, 300, 30.0, "load the model: 300 of 1,200 rows, 0:00:30, about 0:01:30 left"),
        (4, 4, 8.0, "load the model: 4 of 4 rows, 0:00:08, about 0:00:00 left"),
    ],
)
def test_a_step_says_what_it_does_how_far_it_is_and_when_it_ends(
    total: int | None, done: int, seconds: float, text: str
) -> None:
    clock = SimulatedClock()
    step = Step("load the model", total, "rows", clock=clock)
    clock.now += seconds
    step.advance(done)
    assert str(step) == text


def test_what_was_done_before_does_not_make_the_rest_look_fast() -> None:
    clock = SimulatedClock()
    step = Step("evaluate", 100, "tasks", before=90, clock=clock)
    assert step.left_s is None
    clock.now += 4.0
    step.advance()
    step.note = "task 7"
    assert str(step) == "evaluate: 91 of 100 tasks, 0:00:04, about 0:00:36 left | task 7"


@given(total=st.integers(0, 10**9), before=st.integers(0, 10**9), done=st.integers(0, 10**9), seconds=st.floats(0, 1e9))
def test_any_count_can_be_shown(total: int, before: int, done: int, seconds: float) -> None:
    clock = SimulatedClock()
    step = Step("count", total, "things", before=before, clock=clock)
    step.advance(done)
    clock.now += seconds
    assert str(step).startswith(f"count: {before + done:,} of {total:,} things, ")
    assert step.left_s is None or step.left_s >= 0


def ends_after(waits: int, clock: SimulatedClock, waited: list[float]) -> Callable[[float], bool]:
    """Return the wait of a step that ends during its last one."""

    def has_ended(seconds: float) -> bool:
        waited.append(seconds)
        clock.now += seconds
        return len(waited) == waits

    return has_ended


@pytest.mark.parametrize("waits", [1, 2, 4])
def test_plain_lines_come_after_a_silence_and_then_now_and_then(waits: int) -> None:
    clock, waited, lines = SimulatedClock(), [], []
    write_lines(Step("load", clock=clock), ends_after(waits, clock, waited), lines.append)
    assert waited == [SILENT_S, *[LINE_S] * (waits - 1)]
    assert lines == [f"load: 0:00:{SILENT_S + LINE_S * place:02.0f}" for place in range(waits - 1)]


def test_the_lines_of_a_step_that_lasts_for_days_stay_few() -> None:
    clock, lines = SimulatedClock(), []
    step = Step("train", clock=clock)

    def has_ended(seconds: float) -> bool:
        clock.now += seconds
        return step.seconds > 3 * 86_400

    write_lines(step, has_ended, lines.append)
    assert len(lines) < 100


def test_of_several_ranks_the_first_one_shows_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "stderr", Stream("", terminal=True))
    before = threading.active_count()
    with doing("train"):
        assert threading.active_count() == before


def test_a_step_that_ends_at_once_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with doing("count", 3) as step:
        assert list(step.count([1, 2, 3])) == [1, 2, 3]
    assert step.done == 3
    assert capsys.readouterr() == ("", "")


def test_a_step_that_lasts_writes_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("\n", terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    with doing("wait", 2, "events") as step:
        step.advance()
        assert stream.came.wait(LIMIT_S)
    assert stream.getvalue().startswith("wait: 1 of 2 events, 0:00:0")


def test_who_reads_nothing_any_more_stops_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(Stream):
        def write(self, text: str) -> int:
            self.came.set()
            raise BrokenPipeError

    stream = Closed("", terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    with doing("wait"):
        assert stream.came.wait(LIMIT_S)


def test_bars_leave_a_result_in_the_file_that_it_goes_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", Stream("-", terminal=True))
    monkeypatch.setenv("TERM", "xterm")
    with doing("ask"):
        print("the result")
    assert capsys.readouterr().out == "the result\n"


def test_a_terminal_shows_bars_that_go_when_the_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("[inner]: 3 rows", terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    clock = SimulatedClock()
    with doing("outer", clock=clock), doing("[inner]", unit="rows", clock=clock) as inner:
        inner.advance(3)
        clock.now += SILENT_S + 1
        assert stream.came.wait(LIMIT_S)
        assert "outer: 0:00:03" in stream.getvalue()
    written = len(stream.getvalue())
    with doing("at once", clock=clock):
        pass
    assert "at once" not in stream.getvalue()[written:]


@pytest.mark.parametrize("terminal", [False, True])
def test_an_error_ends_the_step(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(sys, "stderr", Stream("-", terminal=terminal))
    with pytest.raises(KeyError), doing("fail"):
        raise KeyError
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
