"""The one error that settings raise."""

from __future__ import annotations

__all__ = ["ConfigError"]


class ConfigError(Exception):
    """A setting is unknown, malformed or out of range; the message names the setting, where it came from and the remedy."""
