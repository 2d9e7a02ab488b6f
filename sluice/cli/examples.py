"""`sluice examples`: copy the examples of this version out of the installed package, so that the commands of their pages work."""

from __future__ import annotations

import shutil
from pathlib import Path

import sluice
from sluice.config import ConfigError, Options

FOLDER = Path("examples")
"""Where the commands of the pages look for them."""

_PACKAGED = Path(sluice.__file__).parent / "examples"

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "node_modules", "dist")
"""What is made when an example runs."""


def run(argv: list[str]) -> int:
    """Copy the examples, and say where they are.

    Raises:
        ConfigError: if the directory exists, or cannot be written.
    """
    parser = Options(
        prog="sluice examples", description="Copy the examples of this version, for an install without the repository."
    )
    parser.add_argument("directory", type=Path, nargs="?", default=FOLDER, help="where to (default: examples)")
    copy_examples(parser.parse_args(argv).directory)
    return 0


def copy_examples(directory: Path) -> None:
    """Copy the examples of this version into a new directory, and print its name.

    Raises:
        ConfigError: if the directory exists, or cannot be written.
    """
    try:
        shutil.copytree(_PACKAGED, directory, ignore=_LEFT_OUT)
    except FileExistsError as error:
        raise ConfigError(f"{directory} exists, and nothing is overwritten: name another directory") from error
    except OSError as error:
        raise ConfigError(f"cannot write the examples to {directory}: {error}") from error
    print(f"the examples of this version are in {directory}: see {directory / 'README.md'}")
