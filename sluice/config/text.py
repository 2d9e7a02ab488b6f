"""Settings as text: TOML that loads back, the page of ``--help``, and the reference in docs/configuration.md."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from sluice.config.schema import CommonConfig, FieldType, Value, accepts_none, nested_models
from sluice.config.secrets import redact

__all__ = ["dump_toml", "help_text", "markdown_reference"]


def dump_toml(config: BaseModel, redacted: bool = True) -> str:
    """Return the settings as TOML that loads back to the same settings.

    Args:
        config: A run's or a section's settings.
        redacted: Replace the secrets; see `sluice.config.secrets`. Unredacted text is only for a file that the owner
            alone can read.
    """
    table = _plain(config)
    return tomli_w.dumps(_toml(redact(table) if redacted else table))


def _plain(value: Value) -> Value:
    """Return models as tables and all collections as lists, to any depth; single values stay as they are."""
    match value:
        case BaseModel():
            return _table(value)
        case Mapping():
            return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
        case list() | tuple() | set() | frozenset():
            return [_plain(inner) for inner in value if inner is not None]
        case _:
            return value


def _table(model: BaseModel) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if value is None:
            # TOML has no null: say it where leaving the key out would bring a default back.
            if accepts_none(field.annotation) and field.get_default(call_default_factory=True) is not None:
                table[name] = "none"
            continue
        table[name] = _plain(value)
    # tomli_w writes tables where they stand; a value after one would land inside it.
    return dict(sorted(table.items(), key=lambda item: isinstance(item[1], dict)))


def _toml(value: Value) -> Value:
    """Return a plain value in the types of TOML."""
    match value:
        case SecretStr():
            return value.get_secret_value()
        case dict():
            return {key: _toml(inner) for key, inner in value.items()}
        case list():
            return [_toml(inner) for inner in value]
        case Path():
            return str(value)
        case _:
            return getattr(value, "value", value)


@dataclass(frozen=True)
class _Setting:
    path: str
    type: str
    default: str
    description: str


def help_text(model: type[BaseModel], service: str | None, program: str = "sluice rl") -> str:
    """Return the page of ``--help``: all settings, or the common ones and those of one service, by table."""
    order = "flags > `@ file.toml` (several, later wins) > SLUICE_A__B > defaults"
    lines = [
        f"Settings of `{program}`: {order}.",
        "  @ FILE                 read a TOML file; `--section @ FILE` reads a flat file into one table",
        "  --dry-run              print the resolved settings, secrets redacted, and stop",
        "  --help                 print this",
    ]
    for title, description, settings in _tables(model, service):
        lines += ["", f"[{title}]  {description}" if title else "common settings"]
        for setting in settings:
            lines.append(f"  --{setting.path} {setting.type}  (default: {setting.default})")
            lines.append(f"      {setting.description}")
    return "\n".join(lines) + "\n"


def markdown_reference(model: type[BaseModel]) -> str:
    """Return the page docs/configuration.md without its introduction."""
    parts = []
    for title, description, settings in _tables(model, None):
        parts.append(f"## {f'`[{title}]`' if title else 'Common keys'}\n\n{description}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        parts.extend(
            f"| `{setting.path}` | `{_cell(setting.type)}` | `{_cell(setting.default)}` | {_cell(setting.description)} |"
            for setting in settings
        )
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _tables(model: type[BaseModel], service: str | None) -> Iterator[tuple[str, str, list[_Setting]]]:
    """Title, description and plain settings of each table, outer tables first."""
    common = set(CommonConfig.model_fields)
    default = model.model_construct()
    for path, table, value, description in _walk(model, default, (), "The same for every service."):
        if service is not None and path and path[0] not in common | {service}:
            continue
        settings = [
            _Setting(
                ".".join((*path, name)),
                type_name(field.annotation),
                _default(field, value, name),
                field.description or "",
            )
            for name, field in table.model_fields.items()
            if len(nested_models(field.annotation)) != 1
        ]
        if settings:
            yield ".".join(path), description, settings


def _walk(
    table: type[BaseModel], value: object, path: tuple[str, ...], description: str
) -> Iterator[tuple[tuple[str, ...], type[BaseModel], Any, str]]:
    yield path, table, value, description
    for name, field in table.model_fields.items():
        models = nested_models(field.annotation)
        if len(models) == 1:
            inner = getattr(value, name, None)
            yield from _walk(models[0], inner, (*path, name), field.description or "")


def _default(field: FieldInfo, table: object, name: str) -> str:
    """Return the default as a file would write it. The default of a table's instance wins over that of its class."""
    missing = object()
    value = getattr(table, name, missing) if table is not None else missing
    if value is missing:
        if field.is_required():
            return "required"
        value = field.get_default(call_default_factory=True)
    if field.default_factory is not None and isinstance(value, str | int | float | Path):
        return "computed"  # such as the host's name, which has no place in a page
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return f'"{value}"'
    return str(getattr(value, "value", value))


def type_name(annotation: FieldType) -> str:
    """Return a short name of a field's type: ``int``, ``float | none``, ``list[str]``, ``"a" | "b"``."""
    origin: object = get_origin(annotation)
    if origin is Annotated:
        return type_name(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(part) for part in get_args(annotation))
    if origin is Literal:
        return " | ".join(f'"{part}"' if isinstance(part, str) else str(part) for part in get_args(annotation))
    if origin is not None:
        arguments = ", ".join("..." if part is Ellipsis else type_name(part) for part in get_args(annotation))
        return f"{getattr(origin, '__name__', str(origin)).lower()}[{arguments}]"
    if annotation is type(None):
        return "none"
    return {Path: "path", Any: "any"}.get(annotation, getattr(annotation, "__name__", str(annotation)))
