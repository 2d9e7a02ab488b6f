"""From the command line, files, the environment and defaults to one checked `RunConfig`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field, SecretStr, ValidationError, create_model
from pydantic_core import ErrorDetails

from sluice.config.decide import allocated, decided
from sluice.config.schema import ConfigError, Value, alternatives, deep_merge, leaf_paths
from sluice.config.secrets import REDACTED, is_secret_name, redact_text, secret_values
from sluice.config.sections import CommonConfig, Section
from sluice.config.services import service_configs
from sluice.config.sources import PREFIX, Layer, command_prefix, environment_layer, parse_command_line
from sluice.config.text import dump_toml, help_text
from sluice.devices import visible_devices

__all__ = ["COMMAND_GROUP", "RunConfig", "load_command", "load_run", "run_config_class"]

COMMAND_GROUP = "sluice.commands"
"""Entry points of this group name one `sluice.cli.command.Command` each."""

_Section = TypeVar("_Section", bound=Section)


class RunConfig(CommonConfig):
    """A whole run: the common keys, and one table per installed service as an attribute of its name."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Value:
            """One attribute per service, found at run time."""

    def section(self, service: str) -> Section:
        """The table of a service.

        Raises:
            ConfigError: if the service is not installed here.
        """
        value = getattr(self, service, None)
        if not isinstance(value, Section):
            raise ConfigError(f"the package of service {service!r} is not installed here")
        return value


def run_config_class() -> type[RunConfig]:
    """`RunConfig` with one field per installed service.

    Raises:
        ConfigError: if a service's package breaks the convention of `sluice.config`.
    """
    fields: dict[str, Any] = {}
    for name, config_class in service_configs().items():
        description = f"The table of the service {name}."
        if config_class is None:
            fields[name] = (
                dict[str, Any],
                Field(default_factory=dict, description=f"{description} Not installed here."),
            )
        else:
            fields[name] = (config_class, Field(default_factory=config_class, description=description))
    return create_model("RunConfig", __base__=RunConfig, **fields)


def load_run(
    argv: Sequence[str],
    service: str | None = None,
    *,
    check: Callable[[RunConfig], Iterable[str] | None] = lambda _: None,
) -> RunConfig:
    """Resolve the settings of a run: flags > files (later wins) > environment > defaults.

    Args:
        argv: The command line after the program's and the command's name.
        service: The one service that this process runs; flags that are not common keys mean its table.
        check: Raises a `ConfigError` for settings that do not fit each other or this machine. Called before a dry run
            prints them. It may return lines that the dry run prints.

    Raises:
        ConfigError: if anything is unknown, malformed or out of range.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` printed what it prints.
    """

    def complete(config: RunConfig) -> tuple[RunConfig, Sequence[str]]:
        config, decisions = decided(allocated(config), cuda=bool(visible_devices(os.environ)))
        notes = check(config) or ()
        return config, [*(f"decided: {decision}" for decision in decisions), *notes]

    commands = tuple(command_prefix(point.name) for point in entry_points(group=COMMAND_GROUP))
    return _load(run_config_class(), argv, service or "rl", complete, service=service, foreign=commands)


def load_command(
    config_class: type[_Section],
    argv: Sequence[str],
    command: str,
    *,
    check: Callable[[_Section], object] = lambda _: None,
) -> _Section:
    """Resolve the settings of a command that has a class of its own, in the same grammar and order of layers.

    Args:
        config_class: The command's settings.
        argv: The command line after the command's name.
        command: The command's name; its variables are ``SLUICE_<COMMAND>__KEY``.
        check: As of `load_run`.

    Raises:
        ConfigError: if anything is unknown, malformed or out of range.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` printed what it prints.
    """

    def complete(config: _Section) -> tuple[_Section, Sequence[str]]:
        check(config)
        return config, ()

    return _load(config_class, argv, command, complete, prefix=command_prefix(command))


def _load(
    model: type[_Section],
    argv: Sequence[str],
    command: str,
    complete: Callable[[_Section], tuple[_Section, Sequence[str]]],
    *,
    service: str | None = None,
    prefix: str = PREFIX,
    foreign: tuple[str, ...] = (),
) -> _Section:
    """Read all layers, merge and validate them, and print what ``--help`` or ``--dry-run`` ask for.

    Args:
        model: The class of the settings.
        argv: The command line.
        command: The word after `sluice`.
        complete: Decides and checks what concerns several settings; returns the settings and lines for a dry run.
        service: The one service that this process runs.
        prefix: Beginning of the environment variables.
        foreign: Beginnings of environment variables that belong to others.
    """
    try:
        line = parse_command_line(model, argv, service)
        if line.help:
            sys.stdout.write(help_text(model, service, f"sluice {command}"))
            raise SystemExit(0)
        environment = environment_layer(model, os.environ, prefix=prefix, foreign=foreign)
    except ConfigError as error:
        raise ConfigError(redact_text(str(error))) from None
    layers = [Layer("command line", line.flags), *reversed(line.files), environment]
    try:
        config, notes = complete(_validated(model, layers))
    except ConfigError as error:
        # Without the cause: pydantic's own message repeats the values.
        raise ConfigError(redact_text(str(error), _secrets(model, layers))) from None
    if line.dry_run:
        sys.stdout.write("".join(f"# {note}\n" for note in notes) + dump_toml(config))
        raise SystemExit(0)
    return config


def _validated(model: type[_Section], layers: Sequence[Layer]) -> _Section:
    """Merge the layers, the first over the others, and validate the result.

    Raises:
        ConfigError: if a value is malformed or out of range; one line per mistake, with the layer it came from.
    """
    table: dict[str, Any] = {}
    for layer in reversed(layers):
        table = deep_merge(table, layer.data)
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(problem, layers) for problem in error.errors())) from error


def _describe(problem: ErrorDetails, layers: Sequence[Layer]) -> str:
    location = problem["loc"]
    name = ".".join(str(part) for part in location) or "settings"
    source = next((f" (from {layer.label})" for layer in layers if location and layer.contains(location)), "")
    value = problem.get("input")
    given = f"; got {value!r}" if isinstance(value, str | int | float | bool) else ""
    if any(is_secret_name(str(part)) for part in location):
        given = f"; got {REDACTED}"
    return f"{name}: {problem['msg'].removeprefix('Value error, ')}{given}{source}"


def _secrets(model: type[BaseModel], layers: Sequence[Layer]) -> Iterator[str]:
    """Yield the secrets in settings that were not validated."""
    typed = [path for path, field in leaf_paths(model) if SecretStr in alternatives(field.annotation)]
    for layer in layers:
        yield from secret_values(layer.data)
        yield from (str(layer.value(path)) for path in typed if layer.contains(path))
