"""`sluice examples` and `sluice proto`: copy the examples and the contracts of this version out of the installed package."""

from __future__ import annotations

import shutil
from pathlib import Path

import sluice
from sluice.config import ConfigError, Options

FOLDER = Path("examples")
"""Folder in which the commands in the docs expect the examples."""

_PACKAGE = Path(sluice.__file__).parent

_MADE = shutil.ignore_patterns("__pycache__", "node_modules", "dist")
"""Files that running an example creates."""


def run(name: str, argv: list[str]) -> int:
    """Copy the examples (`examples`) or the contracts (`proto`), and say where they are.

    Raises:
        ConfigError: if they cannot be written, or the directory of the examples exists.
    """
    if name == "examples":
        parser = Options(
            prog="sluice examples",
            description="Copy the examples of this version, for an install without the repository.",
        )
        parser.add_argument("directory", type=Path, nargs="?", default=FOLDER, help="where to (default: examples)")
        copy_examples(parser.parse_args(argv).directory)
        return 0
    parser = Options(
        prog="sluice proto",
        description="Copy the contracts of this version, from which protoc makes stubs in any language:"
        " `protoc -I DIRECTORY DIRECTORY/sluice/v1/*.proto`.",
    )
    parser.add_argument("directory", type=Path, help="where to; files of the same names are replaced")
    directory = parser.parse_args(argv).directory
    try:
        shutil.copytree(_PACKAGE / "proto" / "sluice", directory / "sluice", dirs_exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the contracts to {directory}: {error}") from error
    print(f"the contracts of this version are in {directory}/sluice/v1")
    return 0


def copy_examples(directory: Path) -> None:
    """Copy the examples of this version into a new directory, and print its name.

    Raises:
        ConfigError: if the directory exists, or cannot be written.
    """
    try:
        shutil.copytree(_PACKAGE / "examples", directory, ignore=_MADE)
    except FileExistsError as error:
        raise ConfigError(f"{directory} exists, and nothing is overwritten: name another directory") from error
    except OSError as error:
        raise ConfigError(f"cannot write the examples to {directory}: {error}") from error
    print(f"the examples of this version are in {directory}: see {directory / 'README.md'}")
