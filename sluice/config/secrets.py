"""Which values of the settings are secret, and text without them. Pure.

A value is secret by its type (`SecretStr`), by the name of its key or of a table around it (``judge_key``,
``[headers] Authorization``), or by its form (``sk-...``, the password in a URL).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel, SecretStr

Value: TypeAlias = Any

REDACTED = "**********"

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
"""Words of a key in snake_case, kebab-case or camelCase."""

_ALWAYS = frozenset(
    {"apikey", "authorization", "bearer", "credential", "passphrase", "passwd", "password", "pwd", "secret"}
)
"""Last words of names that hold secrets."""

_KEY_OF = frozenset(
    [
        "access",
        "account",
        "admin",
        "api",
        "auth",
        "client",
        "encryption",
        "judge",
        "master",
        "openai",
        "private",
        "secret",
        "service",
        "signing",
        "user",
    ]
)
"""Words before ``key`` that make it a secret; an ``answer_key`` names a column, a ``tls_key`` a file."""

_TOKEN_OF_A_VOCABULARY = frozenset(
    [
        "begin",
        "bos",
        "cls",
        "end",
        "eos",
        "image",
        "mask",
        "pad",
        "sep",
        "start",
        "stop",
        "think",
        "thinking",
        "tool",
        "unk",
        "vocab",
    ]
)
"""Words before ``token`` that make it a part of a text."""

_LOOKALIKES = re.compile(
    r"\b(?:(?:sk|rk|pk)-[\w-]{8,}|hf_\w{8,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{8,}|A(?:KIA|SIA)[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|(?<=Bearer )\S{8,}"
)
"""Forms of the keys of OpenAI, Hugging Face, GitHub, GitLab, Slack, AWS and Google, JSON web tokens, and bearer tokens."""

_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):([^/@\s]+)@")
_URL_ARGUMENT = re.compile(r"(?<=[?&])([\w.-]+)=([^\s&#\"']+)")
_ASSIGNMENT = re.compile(r"(?<![\w.-])([\w.-]+)[\"']?\s*[=:]\s*[\"']?([^\s&,;\"'}\]]+)")
"""``name=value`` or ``"name": "value"`` in a message."""

_SHORTEST = 4
"""Shorter secrets are not looked for in a text: they would be found inside ordinary words."""


def is_secret_name(name: str) -> bool:
    """Return whether a value under this key is secret, such as ``api_key``, ``hf-token`` or ``judgePassword``."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    last, before = words[-1].removesuffix("s"), words[-2] if len(words) > 1 else ""
    if last in _ALWAYS or words[-1] in _ALWAYS:
        return True
    if last == "key":
        return before in _KEY_OF
    return words[-1] == "token" and before not in _TOKEN_OF_A_VOCABULARY


def redact(value: Value, name: str = "") -> Value:
    """Return plain settings without their secrets, to any depth.

    Args:
        value: A table, a list or a single value; not a pydantic model.
        name: Its key.
    """
    secret = is_secret_name(name)
    match value:
        case SecretStr():
            return REDACTED
        case Mapping():
            return {key: redact(inner, name if secret else str(key)) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [redact(inner, name) for inner in value]
        case str() if not secret:
            return _without_forms(value)
        case str() | int() | float() if secret and not isinstance(value, bool):
            return REDACTED
        case _:
            return value


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a message without secrets: known ones, whatever has the form of one, and values beside a secret's name."""
    text = _without_forms(hide(text, secrets))
    return _ASSIGNMENT.sub(_without_value, text)


def hide(text: str, secrets: Iterable[str]) -> str:
    """Return a text without these secrets, also where it is JSON."""
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, REDACTED).replace(json.dumps(secret)[1:-1], REDACTED)
    return text


def _without_forms(text: str) -> str:
    text = _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text)
    text = _URL_ARGUMENT.sub(_without_value, text)
    return _LOOKALIKES.sub(REDACTED, text)


def _without_value(found: re.Match[str]) -> str:
    name, value = found.groups()
    if not is_secret_name(name):
        return found.group()
    return found.group().removesuffix(value) + REDACTED


def secret_values(value: Value, name: str = "") -> Iterator[str]:
    """Yield the texts that `redact` would replace, so that they can be taken out of a message.

    Args:
        value: Settings: a model, a table, a list or a single value.
        name: Its key.
    """
    secret = is_secret_name(name)
    match value:
        case BaseModel():
            for field in type(value).model_fields:
                yield from secret_values(getattr(value, field), field)
        case SecretStr():
            yield value.get_secret_value()
        case Mapping():
            for key, inner in value.items():
                yield from secret_values(inner, name if secret else str(key))
        case list() | tuple() | set() | frozenset():
            for inner in value:
                yield from secret_values(inner, name)
        case str() if not secret:
            yield from (password for _, password in _URL_PASSWORD.findall(value))
            yield from (found for key, found in _URL_ARGUMENT.findall(value) if is_secret_name(key))
            yield from (found.group() for found in _LOOKALIKES.finditer(value))
        case str() | int() | float() if secret and not isinstance(value, bool):
            yield str(value)
        case _:
            pass
