"""Messages of a stream that are larger than a message of the contracts: they travel in parts, and are joined at the other side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import xxhash

from sluice.rpc.errors import SluiceError
from sluice.v1 import session_pb2

PART_BYTES = 1 << 20
"""Most bytes of a part: other calls of the stream get through between two of them."""

_DIGEST_BYTES = 16

_RETRY_AFTER_S = 0.5
"""Seconds after which a large message may come again for which there was no room: others arrive within seconds."""


def split(whole: bytes) -> Iterator[session_pb2.MessagePart]:
    """Yield the parts of a serialised message."""
    view = memoryview(whole)
    for start in range(0, len(whole), PART_BYTES):
        part = session_pb2.MessagePart(content=bytes(view[start : start + PART_BYTES]))
        if not start:
            part.total_bytes, part.digest = len(whole), xxhash.xxh3_128_digest(whole)
        yield part


@dataclass
class _Message:
    """A message as far as it has come."""

    total_bytes: int
    digest: bytes
    content: bytearray = field(default_factory=bytearray)


class PartialMessages:
    """Joins the messages of one stream, so many bytes at a time.

    Args:
        most_bytes: Most bytes of all messages that are held. What a message announces counts until `forget`.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._messages: dict[int, _Message] = {}

    @property
    def held_bytes(self) -> int:
        """Return the bytes that the messages here have, or will have."""
        return sum(each.total_bytes for each in self._messages.values())

    def arrived(self, call: int) -> int:
        """Return how many bytes have come of the message of a call."""
        found = self._messages.get(call)
        return 0 if found is None else len(found.content)

    def forget(self, call: int) -> None:
        """Drop the message of a call, of which more parts may come; there may be none."""
        self._messages.pop(call, None)

    def add(self, call: int, part: session_pb2.MessagePart) -> bytes | None:
        """Take the next part of a call's message; return the whole with its last part. Parts of a message that was dropped are ignored.

        Raises:
            SluiceError: INVALID_ARGUMENT (malformed), DATA_LOSS (the digest differs), RESOURCE_EXHAUSTED (no room beside others). Nothing
                is kept of the message then.
        """
        if part.total_bytes:
            self._begin(call, part)
        message = self._messages.get(call)
        if message is None:
            return None
        message.content += part.content
        left = message.total_bytes - len(message.content)
        if not part.content or len(part.content) > PART_BYTES or left < 0:
            self.forget(call)
            raise SluiceError.invalid_argument(
                "part", f"has {len(part.content)} bytes; give 1 to {PART_BYTES}, and no more than `total_bytes` in all"
            )
        if left:
            return None
        whole = bytes(message.content)
        message.content.clear()
        if xxhash.xxh3_128_digest(whole) != message.digest:
            self.forget(call)
            raise SluiceError.data_loss("DIGEST", f"the parts of call {call} differ from its digest: send it again")
        return whole

    def _begin(self, call: int, part: session_pb2.MessagePart) -> None:
        """Make room for a message."""
        if call in self._messages:
            self.forget(call)
            raise SluiceError.invalid_argument("call", f"{call} began before: give each call a number of its own")
        if part.total_bytes <= PART_BYTES or len(part.digest) != _DIGEST_BYTES:
            raise SluiceError.invalid_argument(
                "part",
                f"announces {part.total_bytes} bytes and a digest of {len(part.digest)}; give more than {PART_BYTES}, and 16",
            )
        held = self.held_bytes
        if held + part.total_bytes > self._most_bytes:
            raise SluiceError.resource_exhausted(
                "TOO_MANY_RPCS",
                f"large calls of {held} bytes are in progress on this stream, and {part.total_bytes} more are beyond the"
                f" {self._most_bytes} that it takes at a time; retry after the delay",
                _RETRY_AFTER_S,
            )
        self._messages[call] = _Message(part.total_bytes, part.digest)
