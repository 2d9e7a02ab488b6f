"""A stage of a longer job: one line with its time when it is done, its log's last lines when it fails."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sluice.cli.child_process import describe_exit

__all__ = ["StageError", "Stages", "run_quietly"]

_TAIL_LINES = 25


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
    """Run a program with its output in a file.

    Args:
        argv: The words after the Python interpreter.
        log: File that its output is appended to.
        environment: All of its variables.

    Returns:
        The last line that it wrote.

    Raises:
        StageError: if it fails; the message holds the last lines of its output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        done = subprocess.run(  # noqa: S603 - our own programs
            [sys.executable, *argv], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, check=False
        )
    with log.open(encoding="utf-8", errors="backslashreplace") as lines:
        tail = [line.rstrip() for line in deque(lines, maxlen=_TAIL_LINES)]
    if done.returncode:
        said = "\n".join(f"  | {line}" for line in tail)
        raise StageError(f"{' '.join(argv)}\nended with {describe_exit(done.returncode)}; {log} ends with\n{said}")
    return tail[-1] if tail else ""
