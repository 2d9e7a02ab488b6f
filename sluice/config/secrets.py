"""Which values of the settings are secret, and text without them. Pure.

A value is secret by its type (`SecretStr`), by the name of its key or of a table around it (``judge_key``,
``[headers] Authorization``), or by its form (``sk-...``, the password in a URL).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel, SecretStr

Value: TypeAlias = Any

REDACTED = "**********"

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
"""Words of a key in snake_case, kebab-case or camelCase."""

_ALWAYS = re.compile("apikey|authorization|bearer|credential|passphrase|passwd|password|pwd|secret")
"""Last words of names that hold secrets."""

_KEY_OF = re.compile(
    "access|account|admin|api|auth|client|encryption|judge|master|openai|private|secret|service|signing|user"
)
"""Words before ``key`` that make the value a secret. An ``answer_key`` is not: it names a column; a ``tls_key`` names a file."""

_TOKEN_OF_A_VOCABULARY = re.compile("begin|bos|cls|end|eos|image|mask|pad|sep|start|stop|think|thinking|tool|unk|vocab")
"""Words before ``token`` with which it means a token of a text, not a secret."""

_LOOKALIKES = re.compile(
    r"\b(?:(?:sk|rk|pk)-[\w-]{8,}|hf_\w{8,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{8,}|A(?:KIA|SIA)[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|(?<=Bearer )\S{8,}"
)
"""Patterns of keys of OpenAI, Hugging Face, GitHub, GitLab, Slack, AWS and Google, of JSON web tokens, and of bearer tokens."""

_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):([^/@\s]+)@")
_URL_ARGUMENT = re.compile(r"(?<=[?&])([\w.-]+)=([^\s&#\"']+)")
_ASSIGNMENT = re.compile(r"(?<![\w.-])([\w.-]+)[\"']?\s*[=:]\s*[\"']?([^\s&,;\"'}\]]+)")
"""``name=value`` or ``"name": "value"`` in a message."""

_SHORTEST = 4
"""Characters of the shortest secret that is searched for in a text. Shorter ones would be found inside ordinary words."""


def is_secret_name(name: str) -> bool:
    """Return whether a value under this key is secret, such as ``api_key``, ``hf-token`` or ``judgePassword``."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    last, before = words[-1].removesuffix("s"), words[-2] if len(words) > 1 else ""
    if _ALWAYS.fullmatch(last):
        return True
    if last == "key":
        return _KEY_OF.fullmatch(before) is not None
    return words[-1] == "token" and not _TOKEN_OF_A_VOCABULARY.fullmatch(before)


def redact(value: Value, name: str = "", found: list[str] | None = None) -> Value:
    """Return settings without their secrets, to any depth.

    Args:
        value: A model, a table, a list or a single value.
        name: Its key.
        found: Every secret that is replaced is appended to it.
    """
    found = [] if found is None else found
    secret = is_secret_name(name)
    match value:
        case BaseModel():
            return redact({field: getattr(value, field) for field in type(value).model_fields}, name, found)
        case Mapping():
            return {key: redact(inner, name if secret else str(key), found) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [redact(inner, name, found) for inner in value]
        case SecretStr():
            found.append(value.get_secret_value())
        case str() if not secret:
            return _without_forms(value, found)
        case str() | int() | float() if secret and not isinstance(value, bool):
            found.append(str(value))
        case _:
            return value
    return REDACTED


def secret_values(value: Value) -> list[str]:
    """Return the texts that `redact` would replace, so that they can be taken out of a message."""
    found: list[str] = []
    redact(value, found=found)
    return found


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a message without secrets: the given ones, all texts in the form of a secret, and values after a secret's name."""
    return _ASSIGNMENT.sub(
        lambda found: found[0].removesuffix(found[2]) + REDACTED if is_secret_name(found[1]) else found[0],
        _without_forms(hide(text, secrets), []),
    )


def hide(text: str, secrets: Iterable[str]) -> str:
    """Return a text without these secrets, even if the text is JSON and escapes them."""
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, REDACTED).replace(json.dumps(secret)[1:-1], REDACTED)
    return text


def _without_forms(text: str, found: list[str]) -> str:
    def take(secret: str) -> str:
        found.append(secret)
        return REDACTED

    def take_value(argument: re.Match[str]) -> str:
        return f"{argument[1]}={take(argument[2])}" if is_secret_name(argument[1]) else argument[0]

    text = _URL_PASSWORD.sub(lambda password: f"{password[1]}:{take(password[2])}@", text)
    text = _URL_ARGUMENT.sub(take_value, text)
    return _LOOKALIKES.sub(lambda key: take(key[0]), text)
