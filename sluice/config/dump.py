"""Settings back to TOML, without their secrets unless asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, SecretStr

from sluice.config.merge import Value
from sluice.config.schema import accepts_none

__all__ = ["REDACTED", "dump_toml", "is_secret_name"]

REDACTED = "**********"

_SECRET_NAME = re.compile(r"(^|[_-])(api[_-]?key|secret([_-]key)?|password|passwd|token|credentials?)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):([^/@\s]+)@")


def is_secret_name(name: str) -> bool:
    """Whether a text under this key is one that nobody should see, such as ``api_key`` or ``hf_token``."""
    return _SECRET_NAME.search(name) is not None


def dump_toml(config: BaseModel, redacted: bool = True) -> str:
    """The settings as TOML that loads back to the same settings.

    Args:
        config: A run's or a section's settings.
        redacted: Replace secrets: `SecretStr` fields, texts under names such as ``api_key`` or ``hf_token``, and
            passwords inside URLs. Unredacted text is only for a file that the owner alone can read.
    """
    return tomli_w.dumps(_table(config, redacted))


def _table(model: BaseModel, redacted: bool) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if value is None:
            # TOML has no null: say it where leaving the key out would bring a default back.
            if accepts_none(field.annotation) and field.get_default(call_default_factory=True) is not None:
                table[name] = "none"
            continue
        table[name] = _plain(name, value, redacted)
    # tomli_w writes tables where they stand; a value after one would land inside it.
    return dict(sorted(table.items(), key=lambda item: isinstance(item[1], dict)))


def _plain(name: str, value: Value, redacted: bool) -> Value:
    match value:
        case BaseModel():
            plain: Value = _table(value, redacted)
        case SecretStr():
            plain = REDACTED if redacted else value.get_secret_value()
        case Mapping():
            plain = {str(key): _plain(str(key), inner, redacted) for key, inner in value.items() if inner is not None}
        case list() | tuple() | set() | frozenset():
            plain = [_plain(name, inner, redacted) for inner in value if inner is not None]
        case Path():
            plain = str(value)
        case str() if redacted:
            plain = REDACTED if is_secret_name(name) else _URL_PASSWORD.sub(rf"\1:{REDACTED}@", value)
        case _:
            plain = getattr(value, "value", value)
    return plain
