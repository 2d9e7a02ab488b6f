"""The sources of settings (command line, files, variables, defaults), and how they are merged into one table.

pydantic-settings orders the sources, merges them and validates the result. This module adds what that library does not do: the grammar of
the command line (``@ file.toml``, ``--section @ file.toml``, ``--dotted.key value``) and of variables; docs/architecture.md says why.

The library takes a tenth of a second to import, so only a process that loads settings imports this module.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import yaml
from pydantic import BaseModel, create_model
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from sluice.config.removed import found, is_old_default, without_removed
from sluice.config.schema import (
    FieldType,
    Section,
    Value,
    alternatives,
    deep_merge,
    entry_class,
    is_flag,
    is_open,
    parse_text,
    resolve,
    table_class,
    unsets,
)
from sluice.errors import ConfigError
from sluice.run_files import CONFIG_FILE

_Section = TypeVar("_Section", bound=Section)

SECTION_ALIASES = {"inference": "rollout"}
"""Other names of a table, as the first component of a key in every source."""

FLAG_ALIASES = {"insecure": "security.insecure"}
"""Short names of flags."""

TOLD_TO_AGENTS = {"SLUICE_GATEWAY": ("peers", "gateway"), "SLUICE_GATEWAY_URL": None}
"""Variables in which an evaluation gives its gateway's address to agents of any kind, and the settings that they set here."""

_BOOLEANS = frozenset({"true", "false", "1", "0", "yes", "no", "on", "off"})

PREFIX = "SLUICE_"

NOT_SETTINGS = ("SLUICE_INTERNAL_", "SLUICE_TEST_")
"""Prefixes of variables that are never settings: processes set them for their own children, or tests set them."""

_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)(_[A-Z0-9_]+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")
"""Variables in which Kubernetes describes its Services to each pod. A Service named sluice-* must not stop the pod."""


class _FromSources(BaseSettings):
    """Settings that are read from sources. An earlier source overrides a later one."""

    settings_sources: ClassVar[tuple[PydanticBaseSettingsSource, ...]] = ()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the given sources. Arguments of the constructor override them."""
        return init_settings, *cls.settings_sources


class Source(InitSettingsSource):
    """One source of settings.

    Args:
        label: Its name, for messages.
        table: Nested tables with canonical keys.
    """

    def __init__(self, label: str, table: dict[str, Any]) -> None:
        super().__init__(_FromSources, table)
        self.label, self.table = label, table

    def value(self, path: Iterable[Any]) -> Value:
        """Return the value at a path.

        Raises:
            LookupError: if this source does not set it.
        """
        value: Value = self.table
        for key in path:
            try:
                value = value[key]
            except TypeError as error:
                raise LookupError(f"{key!r} of a value that is no table") from error
        return value

    def sets(self, path: Iterable[Any]) -> bool:
        """Return whether this source sets the value at a path."""
        try:
            self.value(path)
        except LookupError:
            return False
        return True


def combine(model: type[_Section], sources: Sequence[Source]) -> _Section:
    """Return the settings from all sources, and defaults where no source sets a value. An earlier source overrides a later one.

    Raises:
        ValidationError: if they do not fit the model.
    """
    settings = create_model(model.__name__, __base__=(model, _FromSources))
    cast("type[_FromSources]", settings).settings_sources = tuple(sources)
    return cast("type[_Section]", settings)()


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


def file_source(model: type[BaseModel], path: Path, section: str | None) -> Source:
    """Read a file of TOML, or of YAML or JSON if its name ends so.

    Args:
        model: What the settings are validated by.
        path: The file.
        section: The table into which the whole file is read; None if the file has the tables itself.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}") from error
    data = _parsed(path, text)
    if section is not None:
        data = {section: data}
    try:
        present = without_removed(data, recorded=path.name == CONFIG_FILE)
        return Source(str(path), _canonical_table(model, present))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


_PARSERS: Mapping[str, Callable[[str], Any]] = {"JSON": json.loads, "TOML": tomllib.loads, "YAML": yaml.safe_load}


def _parsed(path: Path, text: str) -> dict[str, Any]:
    kind = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}.get(path.suffix, "TOML")
    try:
        data = _PARSERS[kind](text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {kind}: {error}") from error
    except yaml.YAMLError as error:  # its text quotes lines of the file, which may be secrets
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ConfigError(
            f"{path} is not YAML: {getattr(error, 'problem', None) or 'it cannot be read'}{where}"
        ) from None
    if data is None:  # an empty file of YAML
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path} has no settings: it must be a table of keys and values")
    return data


def _canonical_table(annotation: FieldType, value: Value) -> Value:
    """Return a value with canonical keys. The keys of free-form tables stay as they are."""
    table = table_class(annotation)
    if value == "none" and unsets(annotation, value):
        return None
    if isinstance(value, list) and (entry := entry_class(annotation)) is not None:
        return [_canonical_table(entry, each) for each in value]
    if isinstance(value, bool) and bool not in (types := alternatives(annotation)) and {int, float} & {*types}:
        return str(value).lower()  # a field that wants a number then refuses it, instead of taking it as 0 or 1
    if not isinstance(value, Mapping) or table is None:
        return value
    renamed: dict[str, Any] = {}
    for written, inner in value.items():
        key = canonical(str(written))
        if key not in table.model_fields:
            key = SECTION_ALIASES.get(key, key)
        field = table.model_fields.get(key)
        if field is not None:
            renamed = deep_merge(renamed, {key: _canonical_table(field.annotation, inner)})
        else:
            renamed = deep_merge(renamed, {key: inner})
    return renamed


def command_prefix(command: str) -> str:
    """Return the prefix of the environment variables of a command with settings of its own."""
    return f"{PREFIX}{canonical(command).upper()}__"


def environment_source(
    model: type[BaseModel], environment: Mapping[str, str], *, prefix: str = PREFIX, foreign: tuple[str, ...] = ()
) -> Source:
    """Read ``SLUICE_A__B=value`` as key ``a.b``. Empty variables count as unset, since compose files write them.

    Variables that begin with a text of `foreign` belong to other commands.

    Raises:
        ConfigError: if a variable names no setting.
    """
    table: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(prefix) or not text or _is_foreign(variable, foreign):
            continue
        first, *rest = variable.removeprefix(prefix).lower().split("__")
        path: Sequence[str] | None = TOLD_TO_AGENTS.get(variable, (SECTION_ALIASES.get(first, first), *rest))
        if path is None:
            continue
        try:
            if is_old_default(path, text):
                continue
            table = deep_merge(table, nest(path, parse_text(resolve(model, path), text)))
        except ConfigError as error:
            raise ConfigError(f"environment variable {variable}: {error}") from error
    return Source("the environment", table)


def _is_foreign(variable: str, foreign: tuple[str, ...]) -> bool:
    by_kubernetes = "__" not in variable and _KUBERNETES.search(variable) is not None
    return by_kubernetes or variable.startswith((*NOT_SETTINGS, *foreign))


@dataclass
class CommandLine:
    """A parsed command line.

    Attributes:
        files: One source per file, left to right.
        flags: The flags; later ones replace earlier ones.
    """

    files: list[Source] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)
    dry_run: bool = False
    help: bool = False

    @property
    def sources(self) -> list[Source]:
        """The flags, then the files from right to left. An earlier source overrides a later one."""
        return [Source("the command line", self.flags), *reversed(self.files)]


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
            line.files.append(file_source(model, _file_name(word, words), None))
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
        if found(path) is not None and is_old_default(path, text if separator else "".join(words[:1])):
            del words[: 0 if separator else 1]
            return
        annotation = resolve(model, path)
        if (
            not separator
            and words
            and words[0].startswith("@")
            and (table_class(annotation) is not None or len(path) == 1)
        ):
            line.files.append(file_source(model, _file_name(words.pop(0), words), ".".join(path)))
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
