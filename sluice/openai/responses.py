"""Answers in the shapes of OpenAI's two endpoints, whole and as parts of a stream.

Beyond OpenAI's own: `stop_reason` (the stop string that ended a choice), and with `return_token_ids` each choice's `token_ids` and
`version_spans` (the policy versions of its tokens, from the token `start` on) and the `prompt_token_ids` (of the whole
answer in a chat, of each choice in a completion, which may have several prompts).
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
"""The last three are not OpenAI's: an operator ended the request, the model produced NaN, or its adapter was taken away. The
tokens so far are whole."""


LEAST = -9999.0
"""Stands for the logarithm of zero, which JSON cannot say; OpenAI's own value."""

NO_ALTERNATIVES = tokens_pb2.TopLogprobs()

TokenText = Callable[[int], str]
"""Text of one token, special ones included."""


class StopStringFilter:
    """Text up to a stop string, which the answer leaves out; what may be its beginning is held back.

    Args:
        stops: The stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def after(self, new: str, stop_string: str, *, last: bool) -> str:
        """What becomes visible with more text; `stop_string` is what ended it, if anything did."""
        text = self._held + new
        if stop_string:
            return text.partition(stop_string)[0]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that begins a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-size:])), 0)


class Responses(Protocol):
    """How one endpoint writes its answers; keeps what it has to know of a stream's earlier parts."""

    prefix: str
    whole: str
    part: str

    def choice(self, index: int, sample: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """A whole choice."""
        ...

    def delta(self, index: int, new: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """A part of a choice."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The part before a choice's first token, if the endpoint has one."""
        ...

    def answer_extras(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """What is said of the prompt beside the choices."""
        ...

    def choice_extras(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """What is said of the prompt in each choice, once."""
        ...


class ChatResponses:
    """`/v1/chat/completions`."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, token_text: TokenText) -> None:
        self._body, self._token_text = body, token_text

    def choice(self, index: int, sample: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """A whole choice."""
        return {"index": index, "message": {"role": "assistant", "content": text}} | self._rest(sample)

    def delta(self, index: int, new: rollout_pb2.GeneratedSample, text: str) -> dict[str, Any]:
        """A part of a choice."""
        return {"index": index, "delta": {"content": text} if text else {}} | self._rest(new)

    def opening(self, index: int) -> dict[str, Any]:
        """Says who speaks."""
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def answer_extras(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """The prompt's ids, where they are wanted."""
        return {"prompt_token_ids": list(prompt_ids)} if self._body.return_token_ids else {}

    def choice_extras(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Nothing: all choices have one prompt."""
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
        """A whole choice, or a part of one: this endpoint knows no difference."""
        logprobs = None
        if self._body.logprobs is not None:
            offset = self._offsets.get(index, 0)
            logprobs, self._offsets[index] = completion_logprobs(sample, self._token_text, offset)
        return {"index": index, "text": text, "logprobs": logprobs} | _ending(sample) | _tokens(self._body, sample)

    delta = choice

    def opening(self, index: int) -> None:
        """Nothing is said before the first token."""
        del index

    def answer_extras(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Nothing: choices differ in their prompts."""
        del prompt_ids
        return {}

    def choice_extras(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """The prompt's ids, where they are wanted."""
        return {"prompt_token_ids": list(prompt_ids)} if self._body.return_token_ids else {}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """How many tokens went in and came out; `cached_tokens` of the prompt were in the prefix cache."""
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
    """`logprobs` of a chat choice; a token that is part of a character has no bytes of its own."""

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
    """`logprobs` of a completion choice, and where its text ends.

    Args:
        sample: A sample or a part of one.
        token_text: Text of a token.
        offset: Characters of the choice's text before this part.
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
