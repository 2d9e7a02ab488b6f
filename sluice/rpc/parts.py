"""Messages of a stream that exceed the contracts' message size: they are sent in parts and joined at the other side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import xxhash

from sluice.rpc.errors import SluiceError
from sluice.v1 import session_pb2

PART_BYTES = 1 << 20
"""Most bytes of a part. Messages of other calls of the stream are sent between two parts."""

_DIGEST_BYTES = 16

_RETRY_AFTER_S = 0.5
"""Seconds after which to retry a large message for which there was no room. The messages before it arrive within seconds."""


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
    """A message that has arrived in part."""

    total_bytes: int
    digest: bytes
    content: bytearray = field(default_factory=bytearray)


class PartialMessages:
    """Joins the messages of one stream, within a limit of memory.

    Args:
        most_bytes: Most bytes of all messages that are held. The announced size of a message counts until `forget`.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._messages: dict[int, _Message] = {}

    @property
    def held_bytes(self) -> int:
        """Return the sum of the announced sizes of the messages held."""
        return sum(each.total_bytes for each in self._messages.values())

    def arrived(self, call: int) -> int:
        """Return how many bytes of a call's message have arrived."""
        found = self._messages.get(call)
        return 0 if found is None else len(found.content)

    def forget(self, call: int) -> None:
        """Drop the message of a call, if there is one. Further parts of the message may still arrive."""
        self._messages.pop(call, None)

    def add(self, call: int, part: session_pb2.MessagePart) -> bytes | None:
        """Take the next part of a call's message, and return the whole message after its last part. Ignore parts of a dropped message.

        Raises:
            SluiceError: INVALID_ARGUMENT (malformed), DATA_LOSS (the digest differs), RESOURCE_EXHAUSTED (no room besides other messages).
                The message is then dropped.
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
