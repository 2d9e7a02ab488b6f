"""A rank that runs a script; arguments: its file, and what it is given."""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
