"""Errors that processes without the settings' libraries raise as well. Imports nothing."""

from __future__ import annotations


class ConfigError(Exception):
    """A setting is unknown, malformed or out of range. The message names the setting, its source and the remedy."""


class BindError(ConfigError):
    """A server cannot listen at its address, most often because another program took the port. Another port may be free."""


def reason_of(error: BaseException) -> str:
    """Return the first line of a library's error; its type if it has no message."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__).rstrip(".:")
