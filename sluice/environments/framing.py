"""The bytes between the orchestrator and a process of the environment: four bytes of length, then one JSON object.

Only plain data passes: texts, numbers, booleans, None, lists, and mappings whose keys are texts. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_FRAME_BYTES = 64 << 20
"""Maximum bytes of a frame. A group of 256 completions of 100 KB each fits."""

_MAX_DEPTH = 64
"""Maximum nesting. A list that contains itself exceeds it, too."""

_LENGTH_BYTES = 4


class NotPlainError(ValueError):
    """A value cannot leave its process. The message says which value, and which types can."""


class BrokenFrameError(Exception):
    """The bytes are not frames: something else was written to the connection."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the frame of a message.

    Raises:
        NotPlainError: if a value is not plain data, or the frame would be too long.
    """
    try:
        body = json.dumps(_plain(message, "", 0), separators=(",", ":")).encode()
    except NotPlainError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise NotPlainError(str(error)) from error
    if len(body) > MAX_FRAME_BYTES:
        raise NotPlainError(f"it has {len(body) >> 20} MiB; at most {MAX_FRAME_BYTES >> 20} MiB can be sent")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def _plain(value: Any, where: str, depth: int) -> Any:  # noqa: ANN401 - whatever an environment returns
    """Return a copy that consists of JSON's own types."""
    if value is None or type(value) in {str, bool, int, float}:
        return value
    if depth > _MAX_DEPTH:
        raise NotPlainError(f"it is nested more than {_MAX_DEPTH} levels deep")
    match value:
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case list() | tuple():
            return [_plain(inner, f"{where}[{place}]", depth + 1) for place, inner in enumerate(value)]
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise NotPlainError(
                        f"{where or 'it'} has the key {key!r:.100} of type {type(key).__name__}, not str"
                    )
            return {str.__str__(key): _plain(inner, f"{where}.{key}", depth + 1) for key, inner in value.items()}
    raise NotPlainError(
        f"{where.removeprefix('.') or 'it'} is of type {type(value).__name__}; str, int, float, bool, None, lists and dicts"
        " with keys of type str can leave the environment's process"
    )


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = _LENGTH_BYTES
        self._in_body = False

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that these bytes complete.

        Raises:
            BrokenFrameError: if the stream holds anything but frames. Then it cannot be read any further.
        """
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= self._wanted:
            piece = self._buffer[start : start + self._wanted]
            start += self._wanted
            if self._in_body:
                messages.append(_decode(piece))
                self._wanted = _LENGTH_BYTES
            else:
                self._wanted = int.from_bytes(piece, "big")
                if self._wanted > MAX_FRAME_BYTES:
                    raise BrokenFrameError(f"a frame of {self._wanted} bytes is announced; at most {MAX_FRAME_BYTES}")
            self._in_body = not self._in_body
        del self._buffer[:start]
        return messages


def _decode(body: bytearray) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BrokenFrameError(f"a frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BrokenFrameError("a frame is not a JSON object")
    return message
