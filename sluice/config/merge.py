"""Deep merge of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["Value", "deep_merge"]

Value: TypeAlias = Any
"""What a TOML document, a flag or a field may hold: known only to the field that validates it."""


def deep_merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `upper` over `lower`: tables merge key by key, any other value (lists too) replaces what it covers."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
