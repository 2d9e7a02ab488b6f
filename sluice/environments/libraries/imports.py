"""Imports the library of an environment, or says how to install it."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from sluice.errors import ConfigError


def library(module: str, package: str) -> Any:  # noqa: ANN401 - a module
    """Import a library.

    Args:
        module: Name to import.
        package: Name to install.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{package} cannot be imported ({error}): `{sys.executable} -m pip install {package}`, or set"
            " environment_processes.python to the interpreter of a virtual environment that has it"
        ) from error
