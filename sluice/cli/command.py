"""A command of the `sluice` program, and the parser of its options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from sluice.config import ConfigError

__all__ = ["MOST", "Command", "Options", "seconds", "whole_number"]

MOST = 1024
"""More threads, replicas or restarts than this are a typing mistake."""


@dataclass(frozen=True)
class Command:
    """A command: the first word after `sluice`.

    Attributes:
        name: The word, kebab-case.
        help: One line for `sluice --help`.
        run: Takes the words after the name, returns the exit code; `sluice.config.ConfigError` becomes exit code 2.
    """

    name: str
    help: str
    run: Callable[[list[str]], int]


class Options(argparse.ArgumentParser):
    """A parser that raises what is wrong instead of printing it."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message.removeprefix('argument ')}; `{self.prog} --help` lists the options")


def whole_number(low: int, high: int = MOST) -> Callable[[str], int]:
    """Return a type for argparse: whole numbers from `low` to `high`."""

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
    """Parse a number of seconds above 0; a type for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"give a number of seconds above 0, not {text!r}")
    return value
