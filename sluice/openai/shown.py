"""What a client sees of the samples of a request, whole and in parts: messages and texts without their stop strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import xxhash

from sluice.rpc import SluiceError
from sluice.v1 import episode_pb2, rollout_pb2, tokens_pb2


class Begun(NamedTuple):
    """A request that was accepted, before its first token.

    Attributes:
        request_id: Its name; generations are named ``{request_id}/{index}``.
        prompt_tokens: Tokens of the prompt; 0 if they are not known yet.
    """

    request_id: str
    prompt_tokens: int

    @property
    def response_id(self) -> str:
        """Return the name of the first generation, which is the id of the response."""
        return f"{self.request_id}/0"


@dataclass(frozen=True, slots=True)
class Delta:
    """Text of a sample that follows the text already sent. What is sent is a prefix of the message in the result.

    Attributes:
        index: Index of the sample, from 0.
        content: More of its content.
        reasoning: More of its reasoning, all of which precedes the content.
    """

    index: int
    content: str = ""
    reasoning: str = ""


Result: TypeAlias = episode_pb2.EpisodeServiceGenerateResponse
"""What was sampled and recorded, with each message as `visible_message` returns it. Of a prompt that is no conversation, the content of the
message is the text."""


class Reply(Protocol):
    """Writes the response to one request of a dialect."""

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the JSON of a response."""
        ...

    def opening(self, begun: Begun) -> Iterator[bytes]:
        """Yield the events before the first token."""
        ...

    def text(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events for more text."""
        ...

    def ending(self, result: Result) -> Iterator[bytes]:
        """Yield the events that end the stream."""
        ...

    def failure(self, error: SluiceError) -> bytes:
        """Return the event of an error after which the stream ends."""
        ...


def visible_message(sample: rollout_pb2.GeneratedSample, generation_id: str) -> tokens_pb2.ChatMessage:
    """Return a sampled message as the client gets it, and sends it back.

    It has no stop string, and each of its tool calls has an id: one of ours where the model's format has none.

    Args:
        sample: The sample. Without a message, its text is the content.
        generation_id: Its name.
    """
    shown = tokens_pb2.ChatMessage()
    if sample.HasField("message"):
        shown.CopyFrom(sample.message)
    else:
        shown.content = sample.text
    shown.role = "assistant"
    if sample.stop_string:
        shown.content = shown.content.partition(sample.stop_string)[0]
        shown.reasoning = shown.reasoning.partition(sample.stop_string)[0]
    for index, call in enumerate(shown.tool_calls):
        call.id = call.id or f"call_{xxhash.xxh3_64_hexdigest(f'{generation_id}/{index}'.encode())}"
    return shown


class StopStringFilter:
    """Removes the stop string from the end of a text that comes in parts. What may be its beginning is held back.

    The text is cut where the string is first, which may be before its end: a sample may have to reach `min_tokens`, and the texts
    around a tool call are joined. So what follows any of the strings is held back, too.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = [""]
        self.is_cut = False
        """Whether a stop string was found, so that the rest is held back until the end."""

    def after(self, new: str, stop_string: str, *, last: bool) -> str:
        """Return what can be shown after more text. `stop_string` is the one that ended the text, if any did."""
        self._held.append(new)
        if self.is_cut and not (last or stop_string):
            return ""
        text = "".join(self._held)
        if stop_string or last:
            self._held.clear()
            return text.partition(stop_string)[0] if stop_string else text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.is_cut = bool(found)
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        end = min([len(text) - held, *found])
        self._held = [text[end:]]
        return text[:end]

    def complete(self) -> str:
        """Return what was held back as the beginning of a stop string, since no more text follows before the end of the sample."""
        if self.is_cut:
            return ""
        text = "".join(self._held)
        self._held.clear()
        return text


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of the mark, and not all of it."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) - at if at >= 0 else 0


class MessageFilter:
    """Removes the stop string from reasoning and content that come in parts; see `StopStringFilter`. Reasoning is shown first.

    Args:
        stops: The stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._reasoning, self._content = StopStringFilter(stops), StopStringFilter(stops)
        self._unshown: list[str] = []
        self._is_reasoned = False

    def after(self, reasoning: str, content: str, stop_string: str, *, last: bool) -> tuple[str, str]:
        """Return the reasoning and the content that can be shown after more of them."""
        shown = self._reasoning.after(reasoning, stop_string, last=last)
        if content and not (last or self._is_reasoned):
            self._is_reasoned = True
            shown += self._reasoning.complete()
        self._unshown.append(content)
        if self._reasoning.is_cut and not last:
            return shown, ""
        content = "".join(self._unshown)
        self._unshown.clear()
        return shown, self._content.after(content, stop_string, last=last)


class TextDeltas:
    """What samples say, as it comes and without their stop strings: the messages of a conversation, else the texts.

    Args:
        stops: The stop strings.
        of_messages: Whether the samples are messages.
    """

    def __init__(self, stops: Sequence[str], *, of_messages: bool) -> None:
        self._stops, self._of_messages = stops, of_messages
        self._filters: dict[int, MessageFilter] = {}

    def of(self, chunk: rollout_pb2.StreamChunk) -> Iterator[Delta]:
        """Yield what can be shown after a message of the stream."""
        for each in chunk.deltas:
            shown = self.after(each)
            if shown.reasoning or shown.content:
                yield shown

    def after(self, delta: rollout_pb2.SampleDelta) -> Delta:
        """Return what can be shown after more of one sample."""
        new = delta.tokens
        said = (delta.reasoning, delta.content) if self._of_messages else ("", new.text)
        visible = self._filters.setdefault(new.index, MessageFilter(self._stops))
        reasoning, content = visible.after(*said, new.stop_string, last=bool(new.finish_reason))
        return Delta(new.index, content, reasoning)


class Unshown:
    """Tracks how much of each message a stream has sent."""

    def __init__(self) -> None:
        self._content: dict[int, int] = {}
        self._reasoning: dict[int, int] = {}

    def sent(self, delta: Delta) -> None:
        """Account for text that is sent."""
        self._content[delta.index] = self._content.get(delta.index, 0) + len(delta.content)
        self._reasoning[delta.index] = self._reasoning.get(delta.index, 0) + len(delta.reasoning)

    def rest(self, index: int, message: tokens_pb2.ChatMessage) -> Delta:
        """Return what is left of a whole message."""
        content, reasoning = self._content.get(index, 0), self._reasoning.get(index, 0)
        return Delta(index, message.content[content:], message.reasoning[reasoning:])
