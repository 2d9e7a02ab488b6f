"""A stage of a longer job: one line with its time when it is done, its log's last lines when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sluice.cli.child_logs import LogLine
from sluice.cli.child_process import ChildSpec
from sluice.cli.restart_policy import RestartLimits
from sluice.cli.supervisor import ChildState, Ending, Supervisor, run_until_signal

__all__ = ["StageError", "Stages", "run_quietly"]


class StageError(Exception):
    """A stage failed; the message is for people."""


class Stages:
    """Announces stages one after the other.

    Args:
        console: Where to write.
        count: How many there will be.
    """

    def __init__(self, console: Console, count: int) -> None:
        self._console, self._count, self._number = console, count, 0
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, title: str, *, quiet: bool = True) -> Iterator[list[str]]:
        """Time a stage.

        Args:
            name: Key of its seconds in `seconds`.
            title: What it does, for people.
            quiet: Whether the stage itself writes nothing, so that its line may wait until it is done.

        Yields:
            A list; what is appended to it ends the line.
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
    """Run a program with its output in a file; a signal ends it in order, with all that it started.

    Args:
        argv: The words after the Python interpreter.
        log: File that its output is appended to.
        environment: Variables over our own.

    Returns:
        The last line that it wrote.

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
    """A program that serves nothing need not be waited for."""


class _LastLine:
    """Keeps the last line of a program."""

    text = ""

    def on_line(self, child: str, line: LogLine) -> None:
        """Keep it."""
        del child
        self.text = line.text

    def on_state(self, child: str, state: ChildState, detail: str) -> None:
        """The stage tells what is to be told."""

    def discard(self, text: str) -> None:
        """The stage ends on a signal without further words."""
