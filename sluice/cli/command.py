"""What a command of the `sluice` program is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Command"]


@dataclass(frozen=True)
class Command:
    """One word after `sluice`.

    Attributes:
        name: The word, kebab-case.
        help: One line for `sluice --help`.
        run: Takes the words after the name, returns the exit code; `sluice.config.ConfigError` becomes exit code 2.
    """

    name: str
    help: str
    run: Callable[[list[str]], int]
