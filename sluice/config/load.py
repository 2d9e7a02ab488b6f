"""From command line, files, environment and defaults to one checked `RunConfig`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field, SecretStr, create_model
from pydantic_settings import BaseSettings, SettingsConfigDict

from sluice.config.allocate import allocated
from sluice.config.decide import decided
from sluice.config.dump import dump_toml
from sluice.config.errors import ConfigError
from sluice.config.flags import CommandLine, parse_command_line
from sluice.config.layers import PREFIX, Layer, command_prefix, environment_layer
from sluice.config.merge import Value
from sluice.config.reference import help_text
from sluice.config.resolve import resolve_layers
from sluice.config.schema import alternatives, leaf_paths
from sluice.config.secrets import redact_text, secret_values
from sluice.config.sections import CommonConfig, Section
from sluice.config.services import service_configs
from sluice.devices import visible_devices

__all__ = ["COMMAND_GROUP", "RunConfig", "load_command", "load_run", "run_config_class"]

COMMAND_GROUP = "sluice.commands"
"""Entry points of this group name one `sluice.cli.command.Command` each."""

_Config = TypeVar("_Config", bound=BaseModel)
_Section = TypeVar("_Section", bound=Section)


class RunConfig(BaseSettings, CommonConfig):
    """A whole run: the common keys, and one table per installed service as an attribute of its name."""

    model_config = SettingsConfigDict(extra="forbid", validate_default=True)

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
    argv: Sequence[str], service: str | None = None, *, check: Callable[[RunConfig], object] = lambda _: None
) -> RunConfig:
    """Resolve the settings of a run: flags > files (later wins) > environment > defaults.

    Args:
        argv: The command line after the program's and the command's name.
        service: The one service this process runs; flags that are not common keys mean its table.
        check: Refuses settings that do not fit each other or this machine, by a `ConfigError`; before a dry run prints them.

    Raises:
        ConfigError: if anything is unknown, malformed or out of range.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` printed what it prints.
    """
    model = run_config_class()
    line, environment = _read(model, argv, service, foreign=_command_prefixes())

    def complete(config: RunConfig) -> tuple[RunConfig, Sequence[str]]:
        config, decisions = decided(allocated(config), cuda=bool(visible_devices(os.environ)))
        check(config)
        return config, decisions

    return _finish(model, line, environment, f"sluice {service or 'rl'}", service, complete=complete)


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
    line, environment = _read(config_class, argv, None, prefix=command_prefix(command))

    def complete(config: _Section) -> tuple[_Section, Sequence[str]]:
        check(config)
        return config, ()

    return _finish(config_class, line, environment, f"sluice {command}", None, complete=complete)


def _read(
    model: type[BaseModel],
    argv: Sequence[str],
    service: str | None,
    *,
    prefix: str = PREFIX,
    foreign: tuple[str, ...] = (),
) -> tuple[CommandLine, Layer]:
    """Return what the command line and the environment say.

    Raises:
        ConfigError: if a word, a file or a variable is not understood.
    """
    try:
        line = parse_command_line(model, argv, service)
        return line, environment_layer(model, os.environ, prefix=prefix, foreign=foreign)
    except ConfigError as error:
        raise ConfigError(redact_text(str(error))) from None


def _finish(
    model: type[_Config],
    line: CommandLine,
    environment: Layer,
    program: str,
    service: str | None,
    *,
    complete: Callable[[_Config], tuple[_Config, Sequence[str]]],
) -> _Config:
    if line.help:
        sys.stdout.write(help_text(model, service, program))
        raise SystemExit(0)
    layers = [Layer("command line", line.flags), *reversed(line.files), environment]
    try:
        config, decisions = complete(resolve_layers(model, layers))
    except ConfigError as error:
        # Without the cause: pydantic's own message repeats the values.
        raise ConfigError(redact_text(str(error), _secrets(model, layers))) from None
    if line.dry_run:
        sys.stdout.write("".join(f"# decided: {decision}\n" for decision in decisions) + dump_toml(config))
        raise SystemExit(0)
    return config


def _secrets(model: type[BaseModel], layers: Sequence[Layer]) -> Iterator[str]:
    """Yield the secret texts of settings that were not validated."""
    typed = [path for path, field in leaf_paths(model) if SecretStr in alternatives(field.annotation)]
    for layer in layers:
        yield from secret_values(layer.data)
        yield from (str(layer.value(path)) for path in typed if layer.contains(path))


def _command_prefixes() -> tuple[str, ...]:
    """Variables of commands with settings of their own, which are none of the run's."""
    return tuple(command_prefix(point.name) for point in entry_points(group=COMMAND_GROUP))
