"""The classes of settings: look up keys, parse texts, merge tables. Also the error that wrong settings raise."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

__all__ = [
    "ConfigError",
    "FieldType",
    "Value",
    "accepts_none",
    "alternatives",
    "deep_merge",
    "is_flag",
    "is_open",
    "leaf_paths",
    "nested_models",
    "parse_text",
    "reason_of",
    "resolve",
    "suggestion",
    "unknown_keys",
]

Value: TypeAlias = Any
"""What a TOML document, a flag or a field may hold: known only to the field that validates it."""

FieldType: TypeAlias = Any
"""A field's annotation: a class, a union, a generic alias or `Any`."""

_UNIONS = (Union, types.UnionType)


class ConfigError(Exception):
    """A setting is unknown, malformed or out of range. The message names the setting, its source and the remedy."""


def reason_of(error: BaseException) -> str:
    """Return the first line of a library's error; its type if it has no message."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__).rstrip(".:")


def deep_merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return `lower` with `upper` over it: tables merge key by key; any other value, lists included, replaces the one below."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def alternatives(annotation: FieldType) -> tuple[Any, ...]:
    """Return the members of a union, `Annotated` taken off."""
    origin: object = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in _UNIONS:
        return tuple(part for member in get_args(annotation) for part in alternatives(member))
    return (annotation,)


def nested_models(annotation: FieldType) -> tuple[type[BaseModel], ...]:
    """Return the classes of tables that a field of this type may hold; empty for a plain value."""
    return tuple(part for part in alternatives(annotation) if isinstance(part, type) and issubclass(part, BaseModel))


def accepts_none(annotation: FieldType) -> bool:
    """Return whether the field may be unset, by ``none`` in a file or a flag."""
    return type(None) in alternatives(annotation)


def is_flag(annotation: FieldType) -> bool:
    """Return whether the field is a boolean, so that ``--key`` without a value means true."""
    return set(alternatives(annotation)) - {type(None)} == {bool}


def is_open(annotation: FieldType) -> bool:
    """Return whether the text of a value decides its type, as in a table with the user's own keys."""
    return annotation is Any or (bool in alternatives(annotation) and not is_flag(annotation))


def _containers(annotation: FieldType) -> tuple[Any, ...]:
    return tuple(get_origin(part) or part for part in alternatives(annotation))


def _is_mapping(annotation: FieldType) -> bool:
    return any(
        part is Any or (isinstance(part, type) and issubclass(part, Mapping)) for part in _containers(annotation)
    )


def _is_sequence(annotation: FieldType) -> bool:
    return any(part in (list, tuple, set, frozenset) or part is Sequence for part in _containers(annotation))


def _item(annotation: FieldType) -> FieldType:
    """Return the type of a list's items or of a mapping's values; `Any` if it is not declared."""
    for part in alternatives(annotation):
        arguments = get_args(part)
        if arguments:
            return arguments[-1] if issubclass(get_origin(part) or object, Mapping) else arguments[0]
    return Any


def resolve(model: type[BaseModel], path: Sequence[str]) -> FieldType:
    """Return the type of the field at a dotted path.

    Raises:
        ConfigError: if there is no such field; the message suggests the nearest one.
    """
    annotation: Any = model
    for depth, key in enumerate(path):
        models = nested_models(annotation)
        if models:
            field = next((each.model_fields[key] for each in models if key in each.model_fields), None)
            if field is None:
                raise ConfigError(f"unknown key {'.'.join(path)!r}{suggestion(model, path[: depth + 1])}")
            annotation = field.annotation
        elif _is_mapping(annotation):
            annotation = _item(annotation)
        else:
            raise ConfigError(f"unknown key {'.'.join(path)!r}: {'.'.join(path[:depth])!r} is a value, not a table")
    return annotation


def unknown_keys(model: type[BaseModel], data: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of keys that the table's class does not have, in nested tables and lists of tables too."""
    return _unknown(model, data, ())


def _unknown(annotation: FieldType, value: Value, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    models = nested_models(annotation)
    if isinstance(value, Mapping) and models:
        for key, inner in value.items():
            owners = [each.model_fields[key] for each in models if key in each.model_fields]
            if not owners:
                yield (*path, key)
            elif len(owners) == 1:
                yield from _unknown(owners[0].annotation, inner, (*path, key))
    elif isinstance(value, list) and _is_sequence(annotation):
        for index, inner in enumerate(value):
            yield from _unknown(_item(annotation), inner, (*path, str(index)))


def leaf_paths(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield every field that holds a value, not a table, with its path, in order of declaration."""
    for name, field in model.model_fields.items():
        models = nested_models(field.annotation)
        if len(models) == 1:
            yield from leaf_paths(models[0], (*prefix, name))
        else:
            yield (*prefix, name), field


def suggestion(model: type[BaseModel], path: Sequence[str]) -> str:
    """Return the end of a message about an unknown key: the most similar key of its table, else of all tables."""
    table: Any = resolve(model, path[:-1])
    siblings = sorted({name for each in nested_models(table) for name in each.model_fields})
    near = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join((*path[:-1], near[0]))!r}?"
    everywhere = [".".join(leaf) for leaf, _ in leaf_paths(model)]
    same_name = [full for full in everywhere if full.rpartition(".")[2] == path[-1]]
    near = same_name[:1] or difflib.get_close_matches(".".join(path), everywhere, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; valid keys here: {', '.join(siblings)}" if siblings else ""


def parse_text(annotation: FieldType, text: str) -> Value:
    """Parse the text of a flag or a variable for a field: lists by commas or as JSON, tables as JSON, the rest as text.

    Raises:
        ConfigError: if a list or a table is malformed JSON.
    """
    if accepts_none(annotation) and text.lower() == "none":
        return None
    if _is_sequence(annotation):
        return _json(text) if text.startswith("[") else [part.strip() for part in text.split(",") if part.strip()]
    if is_open(annotation):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    if text.startswith("{") and (_is_mapping(annotation) or nested_models(annotation)):
        return _json(text)
    return text


def _json(text: str) -> Value:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        # The text is not shown: it may hold a secret.
        raise ConfigError(f"the value is not JSON: {error.msg} at character {error.pos + 1}") from error
