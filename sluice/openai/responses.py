"""Responses of OpenAI's two endpoints, whole and as chunks of a stream.

These fields are not OpenAI's: `stop_reason` is the stop string that ended a choice. With `return_token_ids`, each choice has
`token_ids` and `version_spans` (which policy version sampled the tokens from index `start` on). `prompt_token_ids` is a field
of the response in a chat, and of each choice in a completion, which may have several prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sluice.openai.requests import ChatRequest, CompletionRequest, GenerationBody
from sluice.v1 import rollout_pb2, tokens_pb2
from sluice.versions import Version

__all__ = [
    "ChatResponses",
    "CompletionResponses",
    "Responses",
    "StopStringFilter",
    "chat_logprobs",
    "completion_logprobs",
    "usage",
]

FINISH_REASONS = {
    tokens_pb2.FINISH_REASON_STOP: "stop",
    tokens_pb2.FINISH_REASON_LENGTH: "length",
    tokens_pb2.FINISH_REASON_ABORT: "abort",
    tokens_pb2.FINISH_REASON_ERROR: "error",
    tokens_pb2.FINISH_REASON_VERSION_RETIRED: "version_retired",
}
"""The last three are not OpenAI's: an operator ended the request, the model's output was NaN, or its adapter was unloaded. The
tokens up to then are valid."""


LEAST = -9999.0
"""OpenAI's value for the logarithm of zero, which JSON does not have."""

NO_ALTERNATIVES = tokens_pb2.TopLogprobs()

TokenText = Callable[[int], str]
"""Returns the text of one token. Special tokens have theirs too."""


class StopStringFilter:
    """Removes the stop string from the end of a text that comes in parts. What may be its beginning is held back.

    Args:
        stops: The stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def after(self, new: str, stop_string: str, *, last: bool) -> str:
        """Return what can be shown after more text. `stop_string` is the one that ended the text, if any did."""
        text = self._held + new
        if stop_string:
            return text.partition(stop_string)[0]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of the stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-size:])), 0)


class Responses(Protocol):
    """Writes the responses of one endpoint. One object serves one request, since a stream has state."""

    prefix: str
    whole: str
    part: str

    def choice(self, index: int, sample: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """Return a whole choice."""
        ...

    def chunk(self, index: int, new: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """Return the choice of one chunk."""
        ...

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Return the choice of the chunk before the first token, if the endpoint has such a chunk."""
        ...

    def response_fields(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Return what the response says about the prompt."""
        ...

    def choice_fields(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Return what each choice says about its prompt."""
        ...


class ChatResponses:
    """`/v1/chat/completions`."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, token_text: TokenText) -> None:
        self._body, self._token_text = body, token_text

    def choice(self, index: int, sample: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """Return a whole choice."""
        return {"index": index, "message": {"role": "assistant", "content": text}} | self._rest(sample)

    def chunk(self, index: int, new: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """Return the choice of one chunk."""
        return {"index": index, "delta": {"content": text} if text else {}} | self._rest(new)

    def first_chunk(self, index: int) -> dict[str, Any]:
        """Return the chunk with the role."""
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def response_fields(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Return the ids of the prompt if they were asked for."""
        return {"prompt_token_ids": list(prompt_ids)} if self._body.return_token_ids else {}

    def choice_fields(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Return nothing: all choices have the same prompt."""
        del prompt_ids
        return {}

    def _rest(self, sample: rollout_pb2.GeneratedSample) -> dict[str, Any]:
        logprobs = chat_logprobs(sample, self._token_text) if self._body.logprobs else None
        return {"logprobs": logprobs} | _ending(sample) | _tokens(self._body, sample)


class CompletionResponses:
    """`/v1/completions`."""

    prefix = "cmpl-"
    whole = "text_completion"
    part = "text_completion"

    def __init__(self, body: CompletionRequest, token_text: TokenText) -> None:
        self._body, self._token_text = body, token_text
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, sample: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """Return a whole choice or that of one chunk: they have the same form at this endpoint."""
        logprobs = None
        if self._body.logprobs is not None:
            offset = self._offsets.get(index, 0)
            logprobs, self._offsets[index] = completion_logprobs(sample, self._token_text, offset)
        return {"index": index, "text": text, "logprobs": logprobs} | _ending(sample) | _tokens(self._body, sample)

    chunk = choice

    def first_chunk(self, index: int) -> None:
        """Return nothing: the first chunk has tokens."""
        del index

    def response_fields(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Return nothing: choices may have different prompts."""
        del prompt_ids
        return {}

    def choice_fields(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Return the ids of the prompt if they were asked for."""
        return {"prompt_token_ids": list(prompt_ids)} if self._body.return_token_ids else {}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """Return the token counts. `cached_tokens` of the prompt were in the prefix cache."""
    counted: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return counted if cached_tokens is None else counted | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


def _ending(sample: rollout_pb2.GeneratedSample) -> dict[str, Any]:
    return {"finish_reason": FINISH_REASONS.get(sample.finish_reason), "stop_reason": sample.stop_string or None}


def _tokens(body: GenerationBody, sample: rollout_pb2.GeneratedSample) -> dict[str, Any]:
    if not body.return_token_ids:
        return {}
    spans = [
        {"start": span.start, "version": str(Version.from_proto(span.policy_version))} for span in sample.version_spans
    ]
    return {"token_ids": list(sample.token_ids), "version_spans": spans}


def chat_logprobs(sample: rollout_pb2.GeneratedSample, token_text: TokenText) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice. A token that is part of a character has no `bytes`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in text
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode()) if whole else None}

    content = []
    for position, (token, logprob) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        top = sample.top_logprobs[position] if sample.top_logprobs else NO_ALTERNATIVES
        alternatives = [entry(*each) for each in zip(top.ids, top.logprobs, strict=True)]
        content.append(entry(token, logprob) | {"top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def completion_logprobs(
    sample: rollout_pb2.GeneratedSample, token_text: TokenText, offset: int
) -> tuple[dict[str, Any], int]:
    """Return the `logprobs` of a completion choice, and the offset of the end of its text.

    Args:
        sample: A sample, or its tokens in one chunk.
        token_text: Returns the text of a token.
        offset: Characters of the choice's text before these tokens.
    """
    texts = [token_text(token) for token in sample.token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top: list[dict[str, float]] = []
    for text, logprob, each in zip(texts, sample.logprobs, sample.top_logprobs, strict=False):
        alternatives = zip(each.ids, each.logprobs, strict=True)
        top.append(
            {token_text(token): max(value, LEAST) for token, value in alternatives} | {text: max(logprob, LEAST)}
        )
    return {
        "tokens": texts,
        "token_logprobs": [max(logprob, LEAST) for logprob in sample.logprobs],
        "top_logprobs": top or None,
        "text_offset": offsets,
    }, offset
