"""Whether a module that a setting names can be imported, found out without importing it."""

from __future__ import annotations

import importlib.util
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = ["importable"]


def importable(module: str) -> bool:
    """Return whether a module's package is installed, on PYTHONPATH, or in the working directory of the services.

    Args:
        module: Its dotted name.
    """
    package = module.partition(".")[0]
    if not package.isidentifier():
        return False
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # one that was imported without a finder, such as `__main__`
        return True
    return found is not None or PathFinder.find_spec(package, [str(Path.cwd())]) is not None
