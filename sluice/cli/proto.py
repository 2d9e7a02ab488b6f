"""`sluice proto`: copy the contracts out of the installed package, or write their reference."""

from __future__ import annotations

import shutil
from pathlib import Path

import sluice
from sluice.config import ConfigError, Options

_PACKAGED = Path(sluice.__file__).parent / "proto"


def run(argv: list[str]) -> int:
    """Copy the contracts.

    Raises:
        ConfigError: if they cannot be written.
    """
    parser = Options(
        prog="sluice proto",
        description="Copy the contracts of this version, from which protoc makes stubs in any language:"
        " `protoc -I DIRECTORY DIRECTORY/sluice/v1/*.proto`.",
    )
    parser.add_argument("directory", type=Path, help="where to; files of the same names are replaced")
    directory = parser.parse_args(argv).directory
    try:
        shutil.copytree(_PACKAGED / "sluice", directory / "sluice", dirs_exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the contracts to {directory}: {error}") from error
    print(f"the contracts of this version are in {directory}/sluice/v1")
    return 0
