"""From the command line, files, the environment and defaults to one checked `RunConfig`.

The command line of every program is ``@ file.toml``, ``--section @ file.toml`` and ``--dotted.key value``. Each source is read
into a layer; the layers are merged and validated together.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import BaseModel, Field, SecretStr, ValidationError, create_model
from pydantic_core import ErrorDetails

from sluice.config.decide import allocated, decided, played, repeatable, smallest_memory, visible_devices
from sluice.config.schema import (
    CommonConfig,
    FieldType,
    Section,
    Value,
    alternatives,
    deep_merge,
    entry_class,
    is_flag,
    is_open,
    leaf_paths,
    parse_text,
    resolve,
    suggestion,
    table_class,
    unsets,
)
from sluice.config.secrets import REDACTED, is_secret_name, redact_text, secret_values
from sluice.config.services import command_names, service_configs
from sluice.config.text import dump_toml, help_text
from sluice.errors import ConfigError

_Section = TypeVar("_Section", bound=Section)

MOST = 1024
"""More threads, replicas or restarts than this are a typing mistake."""

SECTION_ALIASES = {"inference": "rollout"}
"""Other names of a table, as the first component of a key in every layer."""

FLAG_ALIASES = {"insecure": "security.insecure"}
"""Short names of flags."""

TOLD_TO_AGENTS = {"SLUICE_GATEWAY": ("peers", "gateway"), "SLUICE_GATEWAY_URL": None}
"""Variables by which an evaluation tells agents of any kind where its gateway is, and the settings that they mean here."""

_BOOLEANS = frozenset({"true", "false", "1", "0", "yes", "no", "on", "off"})

PREFIX = "SLUICE_"

NOT_SETTINGS = ("SLUICE_INTERNAL_", "SLUICE_TEST_")
"""Variables that processes set for their own children, and those of the tests: never settings."""

_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)(_[A-Z0-9_]+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")
"""Variables in which Kubernetes describes its Services to each pod. A Service named sluice-* must not stop the pod."""


UNSET = object()


@dataclass(frozen=True)
class Layer:
    """One source of settings: its name for messages, and nested tables with canonical keys."""

    label: str
    data: dict[str, Any]

    def value(self, path: Iterable[Any]) -> Value:
        """Return the value at a path; `UNSET` if this layer does not set it."""
        value: Value = self.data
        for key in path:
            try:
                value = value[key]
            except (LookupError, TypeError):
                return UNSET
        return value


def canonical(key: str) -> str:
    """Return a key in snake_case."""
    return key.replace("-", "_")


def nest(path: Iterable[str], value: Value) -> dict[str, Any]:
    """Return nested tables with one value at a path."""
    *outer, last = path
    table: dict[str, Any] = {last: value}
    for key in reversed(outer):
        table = {key: table}
    return table


def file_layer(model: type[BaseModel], path: Path, section: str | None) -> Layer:
    """Read a TOML file. With `section` the whole file belongs to that table; otherwise it has tables of its own."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    if section is not None:
        data = {section: data}
    return Layer(str(path), _canonical_table(model, data))


def _canonical_table(annotation: FieldType, value: Value) -> Value:
    """Return a value with canonical keys. The keys of free-form tables stay as they are."""
    table = table_class(annotation)
    if value == "none" and unsets(annotation, value):
        return None
    if isinstance(value, list) and (entry := entry_class(annotation)) is not None:
        return [_canonical_table(entry, each) for each in value]
    if isinstance(value, bool) and bool not in (types := alternatives(annotation)) and {int, float} & {*types}:
        return str(value).lower()  # as a text it is refused where a number is wanted, instead of being 0 or 1
    if not isinstance(value, Mapping) or table is None:
        return value
    renamed: dict[str, Any] = {}
    for written, inner in value.items():
        key = canonical(written)
        if key not in table.model_fields:
            key = SECTION_ALIASES.get(key, key)
        field = table.model_fields.get(key)
        renamed = deep_merge(renamed, {key: inner if field is None else _canonical_table(field.annotation, inner)})
    return renamed


def command_prefix(command: str) -> str:
    """Return the prefix of the environment variables of a command with settings of its own."""
    return f"{PREFIX}{canonical(command).upper()}__"


def environment_layer(
    model: type[BaseModel], environment: Mapping[str, str], *, prefix: str = PREFIX, foreign: tuple[str, ...] = ()
) -> Layer:
    """Read ``SLUICE_A__B=value`` as key ``a.b``. Empty variables count as unset, since compose files write them.

    Variables that begin with a text of `foreign` belong to other commands.

    Raises:
        ConfigError: if a variable names no setting.
    """
    data: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(prefix) or not text or _is_foreign(variable, foreign):
            continue
        first, *rest = variable.removeprefix(prefix).lower().split("__")
        path: Sequence[str] | None = TOLD_TO_AGENTS.get(variable, (SECTION_ALIASES.get(first, first), *rest))
        if path is None:
            continue
        try:
            data = deep_merge(data, nest(path, parse_text(resolve(model, path), text)))
        except ConfigError as error:
            raise ConfigError(f"environment variable {variable}: {error}") from error
    return Layer("the environment", data)


def _is_foreign(variable: str, foreign: tuple[str, ...]) -> bool:
    by_kubernetes = "__" not in variable and _KUBERNETES.search(variable) is not None
    return by_kubernetes or variable.startswith((*NOT_SETTINGS, *foreign))


@dataclass
class CommandLine:
    """A parsed command line.

    Attributes:
        files: One layer per file, left to right.
        flags: The flags; later ones replace earlier ones.
    """

    files: list[Layer] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)
    dry_run: bool = False
    help: bool = False


def parse_command_line(model: type[BaseModel], argv: Sequence[str], service: str | None) -> CommandLine:
    """Parse a command line. A flag that names no top-level key belongs to the table of `service`, if there is one."""
    line = CommandLine()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in {"--help", "-h"}:
            line.help = True
        elif word == "--dry-run":
            line.dry_run = True
        elif word.startswith("@"):
            line.files.append(file_layer(model, _file_name(word, words), None))
        elif word.startswith("--") and len(word) > len("--"):
            _read_flag(line, model, word, words, service)
        else:
            raise ConfigError(f"cannot read {word!r}: settings are given as `@ file.toml` or `--key value`")
    return line


def _file_name(word: str, words: list[str]) -> Path:
    """Return the path of ``@path`` or ``@ path``."""
    name = word.removeprefix("@") or (words.pop(0) if words else "")
    if not name:
        raise ConfigError("`@` needs the path of a TOML file after it")
    return Path(name)


def _read_flag(line: CommandLine, model: type[BaseModel], word: str, words: list[str], service: str | None) -> None:
    name, separator, text = word.removeprefix("--").partition("=")
    first, *rest = FLAG_ALIASES.get(canonical(name), canonical(name)).split(".")
    first = SECTION_ALIASES.get(first, first)
    path = (first, *rest)
    if service is not None and first not in model.model_fields:
        path = (service, *path)
    try:
        annotation = resolve(model, path)
        if (
            not separator
            and words
            and words[0].startswith("@")
            and (table_class(annotation) is not None or len(path) == 1)
        ):
            line.files.append(file_layer(model, _file_name(words.pop(0), words), ".".join(path)))
            return
        value = parse_text(annotation, text if separator else _value(annotation, words))
    except ConfigError as error:
        raise ConfigError(f"--{name}: {error}") from error
    line.flags = deep_merge(line.flags, nest(path, value))


def _value(annotation: FieldType, words: list[str]) -> str:
    """Return the word after a flag; ``true`` if a boolean flag, or a flag of a free-form table, stands alone."""
    follows = bool(words) and not words[0].startswith(("--", "@"))
    if is_flag(annotation) and not (follows and words[0].lower() in _BOOLEANS):
        return "true"
    if is_open(annotation) and not follows:
        return "true"
    if not follows:
        raise ConfigError("needs a value: write it after the flag, as `--flag VALUE` or `--flag=VALUE`")
    return words.pop(0)


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
        service: The one service that this process runs; flags that are not common keys mean its table.
        arrange: Decides for the command that starts a run how it uses the devices of its machines, before anything else is decided.
            Returns the settings and lines about it.
        check: Raises a `ConfigError` for settings that do not fit each other or this machine. Called before a dry run
            prints them. It may return lines that the dry run prints.

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

    commands = tuple(command_prefix(name) for name in command_names())
    return _load(run_config_class(), argv, service or "rl", complete, service=service, foreign=commands)


def load_command(
    config_class: type[_Section],
    argv: Sequence[str],
    command: str,
    *,
    check: Callable[[_Section], object] = lambda _: None,
) -> _Section:
    """Resolve the settings of a command that has a class of its own, in the same grammar and order of layers.

    Its environment variables are ``SLUICE_<COMMAND>__KEY``; `check` is that of `load_run`.

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

    `complete` decides and checks what concerns several settings; it returns the settings and lines for a dry run.
    """
    try:
        line = parse_command_line(model, argv, service)
        if line.help:
            sys.stdout.write(help_text(model, service, f"sluice {command}"))
            raise SystemExit(0)
        environment = environment_layer(model, os.environ, prefix=prefix, foreign=foreign)
    except ConfigError as error:
        raise ConfigError(redact_text(str(error))) from None
    layers = [Layer("the command line", line.flags), *reversed(line.files), environment]
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
    """Merge the layers, the first over the others, and validate the result; an error has one line per mistake."""
    table: dict[str, Any] = {}
    for layer in reversed(layers):
        table = deep_merge(table, layer.data)
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(model, problem, layers) for problem in error.errors())) from error


def _describe(model: type[BaseModel], problem: ErrorDetails, layers: Sequence[Layer]) -> str:
    location = problem["loc"]
    too_few = problem["type"] == "missing" and isinstance(location[-1], int)  # of a list of fixed length
    location = location[:-1] if too_few else location
    name = ".".join(str(part) for part in location) or "settings"
    source = next((layer.label for layer in layers if location and layer.value(location) is not UNSET), "")
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


def _secrets(model: type[BaseModel], layers: Sequence[Layer]) -> Iterator[str]:
    """Yield the secrets in settings that were not validated."""
    typed = [path for path, field in leaf_paths(model) if SecretStr in alternatives(field.annotation)]
    for layer in layers:
        yield from secret_values(layer.data)
        yield from (str(value) for value in map(layer.value, typed) if value is not UNSET)


class Options(argparse.ArgumentParser):
    """A parser that raises what is wrong instead of printing it."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line."""
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
