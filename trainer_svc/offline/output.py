"""Where a command writes the directory that it was told to."""

from __future__ import annotations

from pathlib import Path

from sluice.config import ConfigError

__all__ = ["make_parent"]


def make_parent(output: Path) -> None:
    """Make the directory that an output is to lie in, before anything is loaded for it.

    Raises:
        ConfigError: if it cannot be made.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output: cannot write into {output.parent}: {error.strerror}; choose another directory"
        ) from error
