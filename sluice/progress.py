"""Progress of a command's steps on standard error: what it does, how far it is and when it ends, once a step takes over two seconds.

A terminal shows a bar that disappears when the step ends. Elsewhere plain lines are written, less and less often.
If several processes share a job as ranks, only the first rank shows it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from sluice.clock import CLOCK, Clock

SILENT_S = 2.0
"""Seconds for which a step shows nothing."""
LINE_S, GROWTH = 10.0, 0.1
"""Pause between two plain lines of a step: at least `LINE_S`, and at least the fraction `GROWTH` of its duration so far. So lines stay
few, however long the step lasts."""
_LONGEST_S = 1e10
"""Longest time that is shown, in seconds: 300 years."""

_Item = TypeVar("_Item")


class Step:
    """A part of a command that takes time.

    Attributes:
        what: What is done, such as ``load the model``.
        total: Number of units; None if it is not known.
        done: Units done.
        note: Further text to show, such as the last line of the program that does it.
    """

    def __init__(
        self, what: str, total: int | None = None, unit: str = "", *, before: int = 0, clock: Clock = CLOCK
    ) -> None:
        self.what, self.total, self.done, self.note = what, total, before, ""
        self._unit, self._before, self._clock, self._began = unit, before, clock, clock()

    def advance(self, count: int = 1) -> None:
        """Count what was done."""
        self.done += count

    def count(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield items, and count each when the next one is asked for."""
        for each in items:
            yield each
            self.advance()

    @property
    def seconds(self) -> float:
        """Return for how long the step has lasted."""
        return self._clock() - self._began

    @property
    def left_s(self) -> float | None:
        """Return the remaining seconds at the present pace, or None if unknown."""
        here = self.done - self._before
        if not self.total or not here:
            return None
        return self.seconds / here * max(0, self.total - self.done)

    def __str__(self) -> str:
        """Return the step's name, how far it is and when it ends."""
        parts = []
        if self.total is not None:
            parts.append(f"{self.done:,} of {self.total:,} {self._unit}".rstrip())
        elif self.done:
            parts.append(f"{self.done:,} {self._unit}".rstrip())
        parts.append(_time(self.seconds))
        if self.left_s is not None:
            parts.append(f"about {_time(self.left_s)} left")
        return f"{self.what}: {', '.join(parts)}{self.note and f' | {self.note}'}"


@contextlib.contextmanager
def doing(
    what: str, total: int | None = None, unit: str = "", *, before: int = 0, clock: Clock = CLOCK
) -> Iterator[Step]:
    """Show a step while it lasts.

    Args:
        what: What is done, such as ``load the model``.
        total: How many units there are, if that is known.
        unit: Their name in the plural.
        before: Units that were done before this step began; they do not count for its pace.
        clock: Times the step.
    """
    step = Step(what, total, unit, before=before, clock=clock)
    if os.environ.get("RANK", "0") != "0":
        yield step
        return
    if sys.stderr.isatty():
        with _SCREEN.showing(step):
            yield step
        return
    ended = threading.Event()
    writer = threading.Thread(target=write_lines, args=(step, ended.wait, _write), name="progress", daemon=True)
    writer.start()
    try:
        yield step
    finally:
        ended.set()
        writer.join()


def write_lines(step: Step, has_ended: Callable[[float], bool], write: Callable[[str], object]) -> None:
    """Write a line now and then until the step ends.

    Args:
        step: What is shown.
        has_ended: Waits for the given seconds, or until the step has ended; returns whether it has.
        write: Takes a line.
    """
    wait_s = SILENT_S
    while not has_ended(wait_s):
        write(str(step))
        wait_s = max(LINE_S, GROWTH * step.seconds)


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(min(seconds, _LONGEST_S))))


class _Bars(Progress):
    """The steps that last longer than SILENT_S, a line each."""

    def __init__(self) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.fields[step]}", markup=False), BarColumn(bar_width=20))
        # Output to a terminal is drawn above the bars. Output that is redirected to a file must still go there.
        to_terminal = sys.stdout.isatty()
        console = Console(stderr=True)
        super().__init__(*columns, console=console, transient=True, refresh_per_second=4, redirect_stdout=to_terminal)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return what is drawn."""
        shown = []
        for task in self.tasks:
            step: Step = task.fields["step"]
            task.completed, task.total = step.done, step.total
            if step.seconds > SILENT_S:
                shown.append(task)
        yield self.make_tasks_table(shown)


class _Screen:
    """The bars of this process: a terminal has room for one set of them."""

    def __init__(self) -> None:
        self._bars: _Bars | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def showing(self, step: Step) -> Iterator[None]:
        """Show a step."""
        with self._lock:
            if self._bars is None:
                self._bars = _Bars()
                self._bars.start()
            bars = self._bars
            task = bars.add_task("", total=step.total, step=step)
        try:
            yield
        finally:
            with self._lock:
                bars.remove_task(task)
                if not bars.tasks:
                    bars.stop()
                    self._bars = None


_SCREEN = _Screen()
