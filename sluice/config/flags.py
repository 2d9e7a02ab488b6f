"""The command line of every program: ``@ file.toml``, ``--section @ file.toml``, ``--dotted.key value``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sluice.config.errors import ConfigError
from sluice.config.layers import SECTION_ALIASES, Layer, canonical, file_layer, nest
from sluice.config.merge import deep_merge
from sluice.config.schema import FieldType, is_flag, is_open, nested_models, parse_text, resolve

__all__ = ["CommandLine", "parse_command_line"]

FLAG_ALIASES = {"insecure": "security.insecure"}
"""Short names of flags."""

_BOOLEANS = frozenset({"true", "false", "1", "0", "yes", "no", "on", "off"})


@dataclass
class CommandLine:
    """What a command line says.

    Attributes:
        files: One layer per file, left to right.
        flags: The flags, later ones over earlier ones.
        dry_run: Print the resolved settings and stop.
        help: Print every setting and stop.
    """

    files: list[Layer] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)
    dry_run: bool = False
    help: bool = False


def parse_command_line(model: type[BaseModel], argv: Sequence[str], service: str | None) -> CommandLine:
    """Read a command line against the run's class; flags that name no top-level key belong to `service`.

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
    """The path of ``@path`` or of ``@ path``."""
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
    """The word after a flag; ``true`` where a boolean flag, or one of a free-form table, stands alone."""
    follows = bool(words) and not words[0].startswith(("--", "@"))
    if is_flag(annotation) and not (follows and words[0].lower() in _BOOLEANS):
        return "true"
    if is_open(annotation) and not follows:
        return "true"
    if not follows:
        raise ConfigError(f"--{name} needs a value: `--{name} VALUE` or `--{name}=VALUE`")
    return words.pop(0)
