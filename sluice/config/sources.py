"""The sources of settings: TOML files, environment variables and the command line. Each is read into one layer.

The command line of every program is ``@ file.toml``, ``--section @ file.toml`` and ``--dotted.key value``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sluice.config.schema import (
    ConfigError,
    FieldType,
    Value,
    accepts_none,
    deep_merge,
    is_flag,
    is_open,
    nested_models,
    parse_text,
    resolve,
    suggestion,
    unknown_keys,
)

__all__ = ["PREFIX", "CommandLine", "Layer", "command_prefix", "environment_layer", "parse_command_line"]

SECTION_ALIASES = {"inference": "rollout"}
"""Other names of a table, as the first component of a key in every layer."""

FLAG_ALIASES = {"insecure": "security.insecure"}
"""Short names of flags."""

_BOOLEANS = frozenset({"true", "false", "1", "0", "yes", "no", "on", "off"})

PREFIX = "SLUICE_"

NOT_SETTINGS = ("SLUICE_INTERNAL_", "SLUICE_TEST_")
"""Variables that processes set for their own children, and those of the tests: never settings."""

_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)(_[A-Z0-9_]+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")
"""Variables in which Kubernetes describes its Services to each pod. A Service named sluice-* must not stop the pod."""


@dataclass(frozen=True)
class Layer:
    """One source of settings.

    Attributes:
        label: The source, for messages.
        data: Nested tables with canonical keys.
    """

    label: str
    data: dict[str, Any]

    def value(self, path: Iterable[Any]) -> Value:
        """Return the value at a path.

        Raises:
            LookupError: if this layer does not set it.
        """
        value: Value = self.data
        for key in path:
            try:
                value = value[key]
            except TypeError as error:
                raise LookupError(f"there is no table at {key!r}") from error
        return value

    def contains(self, path: Iterable[Any]) -> bool:
        """Return whether this layer sets the value at the path."""
        try:
            self.value(path)
        except LookupError:
            return False
        return True


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
    """Read a TOML file.

    Args:
        model: The class of the settings.
        path: The file.
        section: The table that the whole file belongs to; None if the file has tables of its own.

    Raises:
        ConfigError: if it cannot be read, is not TOML or has an unknown key.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    if section is not None:
        data = {section: data}
    data = _canonical_table(model, data)
    for unknown in unknown_keys(model, data):
        raise ConfigError(f"{path}: unknown key {'.'.join(unknown)!r}{_suggest(model, unknown)}")
    return Layer(str(path), data)


def _suggest(model: type[BaseModel], unknown: tuple[str, ...]) -> str:
    """Return a suggestion; empty inside a list of tables, which has no dotted path."""
    return "" if any(part.isdecimal() for part in unknown[:-1]) else suggestion(model, unknown)


def _canonical_table(annotation: FieldType, value: Value) -> Value:
    """Return a value with canonical keys. The keys of free-form tables stay as they are."""
    models = nested_models(annotation)
    if value == "none" and accepts_none(annotation):
        return None
    if not isinstance(value, Mapping) or not models:
        return value
    table: dict[str, Any] = {}
    for written, inner in value.items():
        key = canonical(written)
        if annotation is models[0]:
            key = SECTION_ALIASES.get(key, key) if key not in models[0].model_fields else key
        field = next((each.model_fields[key] for each in models if key in each.model_fields), None)
        completed = inner if field is None else _canonical_table(field.annotation, inner)
        table = deep_merge(table, {key: completed})
    return table


def command_prefix(command: str) -> str:
    """Return the prefix of the environment variables of a command with settings of its own."""
    return f"{PREFIX}{canonical(command).upper()}__"


def environment_layer(
    model: type[BaseModel], environment: Mapping[str, str], *, prefix: str = PREFIX, foreign: tuple[str, ...] = ()
) -> Layer:
    """Read ``SLUICE_A__B=value`` as key ``a.b``. Empty variables count as unset, since compose files write them.

    Args:
        model: The class of the settings.
        environment: Variables of the process.
        prefix: Prefix of the variables.
        foreign: Prefixes of variables that belong to other commands.

    Raises:
        ConfigError: if a variable names no setting.
    """
    data: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(prefix) or not text or _is_foreign(variable, foreign):
            continue
        first, *rest = variable.removeprefix(prefix).lower().split("__")
        path = (SECTION_ALIASES.get(first, first), *rest)
        try:
            data = deep_merge(data, nest(path, parse_text(resolve(model, path), text)))
        except ConfigError as error:
            raise ConfigError(f"environment variable {variable}: {error}") from error
    return Layer("environment", data)


def _is_foreign(variable: str, foreign: tuple[str, ...]) -> bool:
    by_kubernetes = "__" not in variable and _KUBERNETES.search(variable) is not None
    return by_kubernetes or variable.startswith((*NOT_SETTINGS, *foreign))


@dataclass
class CommandLine:
    """A parsed command line.

    Attributes:
        files: One layer per file, left to right.
        flags: The flags; later ones replace earlier ones.
        dry_run: Print the resolved settings and stop.
        help: Print every setting and stop.
    """

    files: list[Layer] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)
    dry_run: bool = False
    help: bool = False


def parse_command_line(model: type[BaseModel], argv: Sequence[str], service: str | None) -> CommandLine:
    """Parse a command line.

    Args:
        model: The class of the settings.
        argv: The words.
        service: The table of flags that name no top-level key; None if every flag names its table.

    Raises:
        ConfigError: if a word is not understood, a flag is unknown or a file is wrong.
    """
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
    path = _path(model, name, service)
    try:
        annotation = resolve(model, path)
    except ConfigError as error:
        raise ConfigError(f"--{name}: {error}") from error
    if not separator and words and words[0].startswith("@") and (nested_models(annotation) or len(path) == 1):
        line.files.append(file_layer(model, _file_name(words.pop(0), words), ".".join(path)))
        return
    if not separator:
        text = _value(name, annotation, words)
    try:
        value = parse_text(annotation, text)
    except ConfigError as error:
        raise ConfigError(f"--{name}: {error}") from error
    line.flags = deep_merge(line.flags, nest(path, value))


def _path(model: type[BaseModel], name: str, service: str | None) -> tuple[str, ...]:
    name = canonical(name)
    first, *rest = FLAG_ALIASES.get(name, name).split(".")
    first = SECTION_ALIASES.get(first, first)
    if service is not None and first not in model.model_fields:
        return (service, first, *rest)
    return (first, *rest)


def _value(name: str, annotation: FieldType, words: list[str]) -> str:
    """Return the word after a flag; ``true`` if a boolean flag, or a flag of a free-form table, stands alone."""
    follows = bool(words) and not words[0].startswith(("--", "@"))
    if is_flag(annotation) and not (follows and words[0].lower() in _BOOLEANS):
        return "true"
    if is_open(annotation) and not follows:
        return "true"
    if not follows:
        raise ConfigError(f"--{name} needs a value: `--{name} VALUE` or `--{name}=VALUE`")
    return words.pop(0)
