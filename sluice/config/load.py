"""Load the sources of settings into one checked `RunConfig`, or into the settings of one command; print `--help` and `--dry-run`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import BaseModel, Field, SecretStr, ValidationError, create_model
from pydantic_core import ErrorDetails

from sluice.config.decide import allocated, decided, played, repeatable, smallest_memory, visible_devices
from sluice.config.schema import CommonConfig, Section, Value, alternatives, leaf_paths, suggestion
from sluice.config.secrets import REDACTED, is_secret_name, redact_text, secret_values
from sluice.config.services import command_names, service_configs
from sluice.config.text import dump_toml, help_text
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from sluice.config.sources import Source

_Section = TypeVar("_Section", bound=Section)

MOST = 1024
"""More threads, replicas or restarts than this are a typing mistake."""


class RunConfig(CommonConfig):
    """A whole run: the common keys, and one table per installed service as an attribute of its name."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Value:
            """One attribute per service, found at run time."""

    def section(self, service: str) -> Section:
        """Return the table of a service.

        Raises:
            ConfigError: if the service is not installed here.
        """
        value = getattr(self, service, None)
        if not isinstance(value, Section):
            raise ConfigError(f"the package of service {service!r} is not installed here")
        return value


def run_config_class() -> type[RunConfig]:
    """Return `RunConfig` with one field per installed service.

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
    arrange: Callable[[RunConfig], tuple[RunConfig, Sequence[str]]] = lambda run: (run, ()),
    check: Callable[[RunConfig], Iterable[str] | None] = lambda _: None,
) -> RunConfig:
    """Resolve the settings of a run: flags > files (later wins) > environment > defaults.

    Args:
        argv: The command line after the program's and the command's name.
        service: The one service that this process runs. Flags that are not common keys belong to its table.
        arrange: For commands that start a run: decides how the run uses the devices of its machines, before any other decision.
            Returns the settings and lines about the decisions.
        check: Raises a `ConfigError` for settings that contradict each other or do not fit this machine. Called before a dry run
            prints the settings. It may return further lines for the dry run.

    Raises:
        ConfigError: if anything is unknown, malformed or out of range.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` printed what it prints.
    """

    def complete(config: RunConfig) -> tuple[RunConfig, Sequence[str]]:
        if service is not None:
            config = config.model_copy(update={"security": config.security.of_service(service)})
        config, uses = arrange(config)
        config, plays = played(allocated(config))
        cuda = bool(visible_devices(os.environ))
        config, decisions = decided(repeatable(config), cuda=cuda, memory=smallest_memory() if cuda else None)
        decisions, notes = (*uses, *plays, *decisions), check(config) or ()
        return config, [*(f"decided: {decision}" for decision in decisions), *notes]

    return _load(run_config_class(), argv, service or "rl", complete, service=service)


def load_command(
    config_class: type[_Section],
    argv: Sequence[str],
    command: str,
    *,
    check: Callable[[_Section], object] = lambda _: None,
) -> _Section:
    """Resolve the settings of a command with its own class of settings, with the same grammar and order of sources as a run.

    Its environment variables are ``SLUICE_<COMMAND>__KEY``. For `check` see `load_run`.

    Raises:
        ConfigError: if anything is unknown, malformed or out of range.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` printed what it prints.
    """

    def complete(config: _Section) -> tuple[_Section, Sequence[str]]:
        check(config)
        return config, ()

    return _load(config_class, argv, command, complete, own_variables=True)


def _load(
    model: type[_Section],
    argv: Sequence[str],
    command: str,
    complete: Callable[[_Section], tuple[_Section, Sequence[str]]],
    *,
    service: str | None = None,
    own_variables: bool = False,
) -> _Section:
    """Read all sources, combine them, and print what ``--help`` or ``--dry-run`` ask for.

    `complete` makes the decisions and checks that concern several settings. It returns the settings and lines for a dry run.
    """
    from sluice.config.sources import combine, command_prefix, environment_source, parse_command_line  # noqa: PLC0415 - takes a tenth of a second, and not every process loads settings

    try:
        line = parse_command_line(model, argv, service)
        if line.help:
            sys.stdout.write(help_text(model, service, f"sluice {command}"))
            raise SystemExit(0)
        if own_variables:
            environment = environment_source(model, os.environ, prefix=command_prefix(command))
        else:
            foreign = tuple(command_prefix(name) for name in command_names())
            environment = environment_source(model, os.environ, foreign=foreign)
    except ConfigError as error:
        raise ConfigError(redact_text(str(error))) from None
    sources = [*line.sources, environment]
    try:
        config, notes = complete(combine(model, sources))
    except ValidationError as error:
        mistakes = "\n".join(_describe(model, problem, sources) for problem in error.errors())
        # Without the cause: pydantic's own message repeats the values.
        raise ConfigError(redact_text(mistakes, _secrets(model, sources))) from None
    except ConfigError as error:
        raise ConfigError(redact_text(str(error), _secrets(model, sources))) from None
    if line.dry_run:
        sys.stdout.write("".join(f"# {note}\n" for note in notes) + dump_toml(config))
        raise SystemExit(0)
    return config


def _describe(model: type[BaseModel], problem: ErrorDetails, sources: Sequence[Source]) -> str:
    location = problem["loc"]
    too_few = problem["type"] == "missing" and isinstance(location[-1], int)  # of a list of fixed length
    location = location[:-1] if too_few else location
    name = ".".join(str(part) for part in location) or "settings"
    source = next((each.label for each in sources if location and each.sets(location)), "")
    keys = [part for part in location if isinstance(part, str)]
    if problem["type"] == "extra_forbidden":
        near = suggestion(model, keys) if len(keys) == len(location) else ""  # a list of tables has no dotted path
        return f"{source}: unknown key {name!r}{near}" if source else f"unknown key {name!r}{near}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    message = f"needs more values than {problem['input']!r}" if too_few else message
    field = dict(leaf_paths(model)).get(tuple(keys))
    if problem["type"] == "string_pattern_mismatch" and field is not None:
        message = f"does not fit ({field.description})"
    value = problem.get("input")
    given = f"; got {value!r}" if isinstance(value, str | int | float | bool) else ""
    if any(is_secret_name(key) for key in keys):
        given = f"; got {REDACTED}"
    return f"{name}: {message}{given}{f' (from {source})' if source else ''}"


def _secrets(model: type[BaseModel], sources: Sequence[Source]) -> Iterator[str]:
    """Yield the secrets in settings that were not validated."""
    typed = [path for path, field in leaf_paths(model) if SecretStr in alternatives(field.annotation)]
    for source in sources:
        yield from secret_values(source.table)
        yield from (str(source.value(path)) for path in typed if source.sets(path))


class Options(argparse.ArgumentParser):
    """A parser that raises ConfigError instead of printing the error and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise the error about the command line."""
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
