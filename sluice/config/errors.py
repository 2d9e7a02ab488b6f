"""The one error that settings raise."""

from __future__ import annotations

__all__ = ["ConfigError", "reason_of"]


class ConfigError(Exception):
    """A setting is unknown, malformed or out of range; the message names the setting, where it came from and the remedy."""


def reason_of(error: BaseException) -> str:
    """What a library's error says, in one line: its first one, or its kind where it says nothing."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__).rstrip(".:")
