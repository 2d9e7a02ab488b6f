"""Options of commands whose words are read by argparse: a wrong one ends in one line, as a wrong setting does."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from sluice.config import ConfigError

__all__ = ["MOST", "Options", "seconds", "whole_number"]

MOST = 1024
"""More threads, replicas or restarts than this are a slip of the pen."""


class Options(argparse.ArgumentParser):
    """A parser that leaves it to the program to tell what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message.removeprefix('argument ')}; `{self.prog} --help` lists the options")


def whole_number(low: int, high: int = MOST) -> Callable[[str], int]:
    """A type for argparse: whole numbers between two bounds, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"give a whole number from {low} to {high}, not {text!r}")
        return value

    return parse


def seconds(text: str) -> float:
    """A type for argparse: a time above 0, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"give a number of seconds above 0, not {text!r}")
    return value
