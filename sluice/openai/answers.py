"""Output of the dialects: messages and texts of samples without their stop strings, fields of responses, and events of streams."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import xxhash

from sluice.openai.bodies import SamplingBody
from sluice.openai.errors import error_body
from sluice.rpc import SluiceError
from sluice.v1 import episode_pb2, rollout_pb2, tokens_pb2
from sluice.versions import Version


class Begun(NamedTuple):
    """A request that was accepted, before its first token.

    Attributes:
        request_id: Its name. Generations are named ``{request_id}/{index}``.
        prompt_tokens: Number of tokens of the prompt; 0 if not known yet.
    """

    request_id: str
    prompt_tokens: int

    @property
    def response_id(self) -> str:
        """Return the name of the first generation, which is the id of the response."""
        return f"{self.request_id}/0"


@dataclass(frozen=True, slots=True)
class Delta:
    """Text of a sample that follows the text already sent. All text sent so far is a prefix of the message in the result.

    Attributes:
        index: Index of the sample, from 0.
        content: More of its content.
        reasoning: More of its reasoning. All reasoning precedes the content.
    """

    index: int
    content: str = ""
    reasoning: str = ""


Result: TypeAlias = episode_pb2.EpisodeServiceGenerateResponse
"""Recorded samples, with each message as `visible_message` returns it. If the prompt is not a conversation, the content of the message is
the text."""


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
    """Return a sampled message as the client gets it and sends it back.

    It has no stop string. Each tool call has an id, a generated one if the model's format has none.

    Args:
        sample: The sample. Without a message, its text is the content.
        generation_id: Name of the sample's generation.
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
    """Removes the stop string from the end of a text that comes in parts. Text that may be the beginning of a stop string is held back.

    The text is cut at the first occurrence of the stop string, which may not be at the end of the text: a sample may have to reach
    `min_tokens`, and the texts around a tool call are joined. So text after any stop string is held back, too.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = [""]
        self.is_cut = False
        """Whether a stop string was found, so that the rest is held back until the end."""

    def after(self, new: str, stop_string: str, *, last: bool) -> str:
        """Return the text that can be shown after more text has come. `stop_string` is the stop string that ended the text, if any did."""
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
        """Return text that was held back as the beginning of a stop string. Call it when no more text follows before the end of the sample."""
        if self.is_cut:
            return ""
        text = "".join(self._held)
        self._held.clear()
        return text


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of the mark, but not the whole mark."""
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
        """Return the reasoning and the content that can be shown after more of them has come."""
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
    """Text of samples as it comes, without stop strings: parts of messages for a conversation, else plain text.

    Args:
        stops: The stop strings.
        of_messages: Whether the samples are messages.
    """

    def __init__(self, stops: Sequence[str], *, of_messages: bool) -> None:
        self._stops, self._of_messages = stops, of_messages
        self._filters: dict[int, MessageFilter] = {}

    def of(self, chunk: rollout_pb2.StreamChunk) -> Iterator[Delta]:
        """Yield the text that can be shown after a message of the stream."""
        for each in chunk.deltas:
            shown = self.after(each)
            if shown.reasoning or shown.content:
                yield shown

    def after(self, delta: rollout_pb2.SampleDelta) -> Delta:
        """Return the text that can be shown after more of one sample has come."""
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
        """Note text that was sent."""
        self._content[delta.index] = self._content.get(delta.index, 0) + len(delta.content)
        self._reasoning[delta.index] = self._reasoning.get(delta.index, 0) + len(delta.reasoning)

    def rest(self, index: int, message: tokens_pb2.ChatMessage) -> Delta:
        """Return the part of a whole message that was not sent yet."""
        content, reasoning = self._content.get(index, 0), self._reasoning.get(index, 0)
        return Delta(index, message.content[content:], message.reasoning[reasoning:])


# --- fields and events ------------------------------------------------------------------------------------------

FINISH_REASONS = {
    tokens_pb2.FINISH_REASON_STOP: "stop",
    tokens_pb2.FINISH_REASON_LENGTH: "length",
    tokens_pb2.FINISH_REASON_ABORT: "abort",
    tokens_pb2.FINISH_REASON_ERROR: "error",
    tokens_pb2.FINISH_REASON_VERSION_RETIRED: "version_retired",
}
"""The last three reasons are not OpenAI's: an operator ended the request, the model's output was NaN, or its adapter was unloaded. The
tokens before are valid."""


LEAST = -9999.0
"""OpenAI's value for the logarithm of zero, which JSON does not have."""

NO_ALTERNATIVES = tokens_pb2.TopLogprobs()

DONE = b"data: [DONE]\n\n"


TokenText: TypeAlias = Callable[[int], str]
"""Returns the text of one token, also of special tokens."""


def logprob_content(sample: rollout_pb2.GeneratedSample, token_text: TokenText | None = None) -> list[dict[str, Any]]:
    """Return one entry per token. A token with an incomplete character has no `bytes`.

    Args:
        sample: The sample.
        token_text: Returns the text of a token. None: an entry has the id, in the two forms that clients read.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        least = max(logprob, LEAST)
        if token_text is None:
            return {"token": token_name(token), "token_id": token, "logprob": least, "bytes": None}
        text = token_text(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in text
        return {"token": text, "logprob": least, "bytes": list(text.encode()) if whole else None}

    content = []
    for position, (token, logprob) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        top = sample.top_logprobs[position] if sample.top_logprobs else NO_ALTERNATIVES
        alternatives = [entry(*each) for each in zip(top.ids, top.logprobs, strict=True)]
        content.append(entry(token, logprob) | {"top_logprobs": alternatives})
    return content


def token_name(token: int) -> str:
    """Return the name of a token, in vLLM's format for `return_tokens_as_token_ids`."""
    return f"token_id:{token}"


def ending(sample: rollout_pb2.GeneratedSample, *, calls: bool) -> dict[str, Any]:
    """Return the fields that say why a choice ended."""
    reason = FINISH_REASONS.get(sample.finish_reason)
    return {
        "finish_reason": "tool_calls" if calls and reason == "stop" else reason,
        "stop_reason": sample.stop_string or None,
    }


def token_fields(sample: rollout_pb2.GeneratedSample) -> dict[str, Any]:
    """Return the token ids of a choice and the versions that sampled them."""
    spans = [
        {"start": span.start, "version": str(Version.from_proto(span.policy_version))} for span in sample.version_spans
    ]
    return {"token_ids": list(sample.token_ids), "version_spans": spans}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """Return the token counts. `cached_tokens` of the prompt were in the prefix cache."""
    counted: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return counted if cached_tokens is None else counted | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


def usage_of(result: Result) -> dict[str, Any]:
    """Return the token counts of a response."""
    return usage(len(result.prompt_token_ids), sum(len(each.sample.token_ids) for each in result.generations))


def event(content: Mapping[str, Any], name: str = "") -> bytes:
    """Return one event of a stream, with its name where the dialect has names."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {dumps(content)}\n\n".encode()


def dumps(content: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return compact JSON.

    Raises:
        ValueError: for a number that JSON does not have.
    """
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


AnySampling = TypeVar("AnySampling", bound=SamplingBody)


class OpenAIReply(ABC, Generic[AnySampling]):
    """Writes the response to one request of Chat Completions or Completions. It has state: each request has its own.

    A replica writes chunks with the tokens of each choice as they come, or choices from its samples. A gateway has no tokenizer. It writes
    text as it comes, and everything else from the recorded result.

    Args:
        body: The request.
        model: Name of the model in the response; by default as the client wrote it.
        token_text: Returns the text of a token. None: tokens are named by their ids.

    Attributes:
        body: The request.
        prefix: Prefix of the ids of responses at a replica.
        kinds: `object` of a response, and of a chunk.
        choices_have_prompts: Whether each choice has the token ids of its prompt, since choices may have different prompts.
    """

    prefix: ClassVar[str]
    kinds: ClassVar[tuple[str, str]]
    choices_have_prompts: ClassVar[bool]

    def __init__(self, body: AnySampling, model: str | None = None, token_text: TokenText | None = None) -> None:
        self.body, self._token_text = body, token_text
        self._model = body.model if model is None else model
        self._created = int(time.time())
        self._head: dict[str, Any] = {}
        self._unshown = Unshown()

    @abstractmethod
    def choice(
        self,
        index: int,
        sample: rollout_pb2.GeneratedSample,
        message: tokens_pb2.ChatMessage,
        prompt_ids: Sequence[int],
        generation_id: str = "",
    ) -> dict[str, Any]:
        """Return a whole choice, with a message of `visible_message`."""

    def response(
        self, identifier: str, choices: Sequence[dict[str, Any]], counts: dict[str, Any], prompt_ids: Sequence[int]
    ) -> dict[str, Any]:
        """Return the JSON of a response."""
        head = self._fields(identifier, self.kinds[0])
        return {**head, "choices": choices, "usage": counts, **self.prompt(prompt_ids, of_choice=False)}

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the JSON of a recorded response."""
        prompt_ids = result.prompt_token_ids
        choices = [
            self.choice(index, each.sample, each.message, prompt_ids, each.generation_id)
            for index, each in enumerate(result.generations)
        ]
        return self.response(result.generations[0].generation_id, choices, usage_of(result), prompt_ids)

    def set_id(self, identifier: str) -> None:
        """Set the id of the response that chunks belong to."""
        self._head = self._fields(identifier, self.kinds[1])

    def end(self, counts: dict[str, Any]) -> Iterator[bytes]:
        """Yield the last events of a stream: the token counts, if the client wants them, and `[DONE]`."""
        if self.body.include_usage:
            yield event({**self._head, "choices": [], "usage": counts})
        yield DONE

    @staticmethod
    def failure(error: SluiceError) -> bytes:
        """Return the event of an error after which the stream ends."""
        return event(error_body(error))

    def prompt(self, prompt_ids: Sequence[int] | None, *, of_choice: bool) -> dict[str, Any]:
        """Return the ids of a prompt, if the client wants them and they belong to a choice (or not: `of_choice`). None: they were sent before."""
        wanted = self.body.return_token_ids and self.choices_have_prompts is of_choice and prompt_ids is not None
        return {"prompt_token_ids": list(prompt_ids or ())} if wanted else {}

    def _fields(self, identifier: str, kind: str) -> dict[str, Any]:
        return {"id": identifier, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, choice: dict[str, Any], extras: Mapping[str, Any] | None = None) -> bytes:
        no_usage = {"usage": None} if self.body.include_usage else {}
        return event({**self._head, "choices": [choice], **no_usage, **(extras or {})})

    def _end_fields(self, sample: rollout_pb2.GeneratedSample, generation_id: str, *, calls: bool) -> dict[str, Any]:
        """Return why a choice ended, the name of its generation, and the tokens if the client wants them."""
        named = {"generation_id": generation_id} if generation_id else {}
        return ending(sample, calls=calls) | named | (token_fields(sample) if self.body.return_token_ids else {})
