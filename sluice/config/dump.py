"""Settings back to TOML, without their secrets unless asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, SecretStr

from sluice.config.merge import Value
from sluice.config.schema import accepts_none
from sluice.config.secrets import redact

__all__ = ["dump_toml"]


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
