"""Errors that processes without the settings' libraries raise as well. Imports nothing."""

from __future__ import annotations


class ConfigError(Exception):
    """A setting is unknown, malformed or out of range. The message names the setting, its source and the remedy."""


class BindError(ConfigError):
    """A server cannot listen at its address, most often because another program took the port. Another port may be free."""
