"""The stages of a longer job: one line with the seconds of each, and the last lines of its log if it fails."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sluice.supervise.child_logs import LogLine
from sluice.supervise.child_process import ChildSpec
from sluice.supervise.restart_policy import RestartLimits
from sluice.supervise.supervisor import ChildState, Ending, Supervisor, run_until_signal

__all__ = ["StageError", "Stages", "run_quietly"]


class StageError(Exception):
    """A stage failed; the message says why, for people."""


class Stages:
    """Prints the stages of a job.

    Args:
        console: Where to print.
        count: Number of stages.
    """

    def __init__(self, console: Console, count: int) -> None:
        self._console, self._count, self._number = console, count, 0
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, title: str, *, quiet: bool = True) -> Iterator[list[str]]:
        """Run a stage and measure its seconds.

        Args:
            name: Key of its seconds in `seconds`.
            title: What it does, for people.
            quiet: Whether the stage prints nothing itself, so that its line can be printed at its end.

        Yields:
            A list. The texts that are appended to it are printed at the end of the line.
        """
        self._number += 1
        label = f"[{self._number}/{self._count}] {title}"
        details: list[str] = []
        began = time.monotonic()
        if quiet:
            with self._console.status(Text(label)) if self._console.is_terminal else contextlib.nullcontext():
                yield details
        else:
            self._console.print(Text(label), soft_wrap=True)
            yield details
        self.seconds[name] = time.monotonic() - began
        line = Text.assemble(label, f"  {self.seconds[name]:.1f} s", style="green")
        for detail in details:
            line.append(f"  {detail}", style="default")
        self._console.print(line, soft_wrap=True)


def run_quietly(argv: list[str], log: Path, environment: Mapping[str, str]) -> str:
    """Run a Python program with its output in a file. A signal ends it and everything that it started.

    Args:
        argv: Arguments of the Python interpreter.
        log: The file that its output is appended to.
        environment: Variables that are added to those of this process.

    Returns:
        The last line of its output.

    Raises:
        StageError: if it fails; the message holds the last lines of its output.
        KeyboardInterrupt: if a signal ended it.
    """
    witness = _LastLine()
    spec = ChildSpec(log.stem, (sys.executable, *argv), log, _at_once, environment, ends_run=True)
    supervisor = Supervisor([spec], witness, limits=RestartLimits(restarts=0))
    outcome = asyncio.run(run_until_signal(supervisor, witness.discard))
    if outcome.ending is Ending.STOPPED:
        raise KeyboardInterrupt
    if outcome.ending is Ending.FAILED:
        said = "\n".join(f"  | {line}" for line in outcome.tail)
        raise StageError(f"{' '.join(argv)}\n{outcome.reason}; {log} ends with\n{said}")
    return witness.text


async def _at_once() -> None:
    """Return: a program that serves nothing is ready at once."""


class _LastLine:
    """Keeps the last line of a program's output."""

    text = ""

    def on_line(self, child: str, line: LogLine) -> None:
        """Keep the line."""
        del child
        self.text = line.text

    def on_state(self, child: str, state: ChildState, detail: str) -> None:
        """Ignore it: the stage prints the outcome."""

    def discard(self, text: str) -> None:
        """Ignore what is said about a signal."""
