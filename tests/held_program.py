"""A program that stops for good at a chosen place, so that it can be killed there.

Arguments: the place as ``module:function``, at which of its calls, the file that says that it was reached, then as for Python:
``-m module arguments``.
"""

from __future__ import annotations

import runpy
import sys
import threading
from pathlib import Path

from weight_faults.points import Point, arm

HELD_S = 3600.0
"""Longest time that a test may leave the program alone; each one kills it."""


def main() -> None:
    target, nth, reached, flag, module, *arguments = sys.argv[1:]
    assert flag == "-m"

    def hold() -> None:
        Path(reached).touch()
        threading.Event().wait(HELD_S)
        raise AssertionError("nobody killed this program")

    arm(Point(target, nth=int(nth)), hold)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
