"""Becomes a program once whoever started it says so; ends if that one is gone first. Run as a script: `gate.py FD PROGRAM ...`.

Between the start of a child and the note of it to the watchdog the parent may be killed. A child behind the gate has not begun
by then. It imports nothing of Sluice, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main(descriptor: int, argv: list[str]) -> int:
    """Wait for a byte, then run the program in our place.

    Returns:
        1 if there will be no byte, 127 if the program cannot be run, as shells have it.
    """
    if not os.read(descriptor, 1):
        return 1
    os.close(descriptor)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{argv[0]} cannot be started: {error}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
