"""Services and commands of the `sluice` program, and how to find the installed ones without importing them."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sluice.config.schema import CommonConfig, Section
from sluice.errors import ConfigError
from sluice.imports import large_imports

SERVICE_GROUP = "sluice.services"
"""Entry points of this group name one `Service` each. The name of the entry point is the name of the service's table."""

COMMAND_GROUP = "sluice.commands"
"""Entry points of this group name one `Command` each."""


class UnfinishedError(Exception):
    """A signal ended a service before its work was done. A restart continues the work."""


class MissingPeerError(Exception):
    """A service ended because a peer never served. The message names the peer, its address and the remedy; a restart waits anew."""


class FailedForGoodError(Exception):
    """A service gave up, and a restart would not help. The exception's ``__cause__`` is the reason."""


class TooMuchSetAsideError(FailedForGoodError):
    """A run paused because too much was set aside, and nobody resumed it in time. The message says what was set aside, and what to do."""


@dataclass(frozen=True)
class Service:
    """One program of the system.

    Attributes:
        name: Name of the command, of the table in the file and of the entry point.
        config_class: The table's class.
        serve: Builds everything, serves until SIGTERM or SIGINT, drains and returns. A service whose work has an end returns at that
            end. It raises `UnfinishedError` if a signal came first, `MissingPeerError` if a peer never served, and
            `FailedForGoodError` if it gave up.
    """

    name: str
    config_class: type[Section]
    serve: Callable[[CommonConfig, Any], Awaitable[None]]


@dataclass(frozen=True)
class Command:
    """A command: the first word after `sluice`.

    Attributes:
        name: The word, kebab-case.
        help: One line for `sluice --help`.
        run: Takes the words after the name, returns the exit code; `ConfigError` becomes exit code 2.
    """

    name: str
    help: str
    run: Callable[[list[str]], int]


def command_names() -> list[str]:
    """Return the names of the commands that installed packages add, sorted, without importing them."""
    return sorted(point.name for point in entry_points(group=COMMAND_GROUP))


def find_command(name: str) -> Command | None:
    """Import and return a command of an installed package; None if there is none of this name.

    Raises:
        ConfigError: if its entry point is not a `Command`.
    """
    point = next(iter(entry_points(group=COMMAND_GROUP, name=name)), None)
    command = None if point is None else point.load()
    if not isinstance(command, Command | None):
        raise ConfigError(
            f"command {name!r} is not a sluice.config.Command: install its package in the version of this one"
        )
    return command


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=SERVICE_GROUP), key=lambda point: point.name)}


def service_names() -> list[str]:
    """Return the names of the installed services, sorted, without importing them."""
    return list(_entry_points())


def service_configs() -> dict[str, type[Section] | None]:
    """Return the config class of each service, from the light module ``<package>.config``; None if its package is absent.

    Raises:
        ConfigError: if a package does not follow the convention.
    """
    return {name: _config_class(point) for name, point in _entry_points().items()}


def load_service(name: str) -> Service:
    """Import a service with everything that it needs.

    Raises:
        ConfigError: if no such service is installed or its entry point is not a `Service`.
    """
    points = _entry_points()
    if name not in points:
        raise ConfigError(f"no service {name!r} is installed; there are: {', '.join(points) or 'none'}")
    with large_imports():
        service = points[name].load()
    if not isinstance(service, Service):
        raise ConfigError(f"entry point {points[name].value} of service {name} is not a sluice.config.Service")
    return service


def _config_class(point: EntryPoint) -> type[Section] | None:
    package = point.module.rpartition(".")[0] or point.module
    module_name = f"{package}.config"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name in {package, module_name}:
            return None
        raise
    config_class = getattr(module, "CONFIG", None)
    if not (isinstance(config_class, type) and issubclass(config_class, Section)):
        raise ConfigError(
            f"{module_name} has no CONFIG: a service's config module exposes CONFIG = <its Section class>"
        )
    return config_class
