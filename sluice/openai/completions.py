"""OpenAI's Completions: `POST /v1/completions`, with one prompt as text or as token ids."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from sluice.openai import fields
from sluice.openai.dialect import COMPLETION_TOKENS
from sluice.openai.fields import LEAST, ClientRequest, TokenId, fault
from sluice.openai.shown import Begun, Delta, Result, Unshown
from sluice.v1 import episode_pb2, rollout_pb2

NAME = "openai.completions"


class CompletionBody(fields.SamplingBody):
    """Body of a request."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: fields.Alternatives | None = None
    echo: bool | None = None
    suffix: str | None = None


def parse(body: CompletionBody) -> ClientRequest:
    """Return what a body asks for.

    Raises:
        SluiceError: INVALID_ARGUMENT with the field at fault.
    """
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    generate = body.generate_request(max_tokens, body.logprobs or 0)
    request = ClientRequest(NAME, body.model, generate, bool(body.stream))
    body.note_unknown(request)
    if body.echo:
        raise fault("echo", "is not supported: the prompt is not returned; leave it out")
    if body.suffix:
        raise fault("suffix", "is not supported: only the end of a text can be sampled; leave it out")
    prompt: Any = body.prompt
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise fault("prompt", f"has {len(prompt)} prompts, and a recorded request has one: send a request for each")
        prompt = prompt[0]
    if isinstance(prompt, str):
        generate.text = prompt
    else:
        generate.token_ids.ids.extend(prompt)
    return request


class CompletionReply:
    """Writes the response to one request.

    Args:
        body: The request.
    """

    def __init__(self, body: CompletionBody) -> None:
        self._body = body
        self._created = int(time.time())
        self._head: dict[str, Any] = {}
        self._unshown = Unshown()

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the JSON of a response."""
        choices = [
            {"index": index, "text": each.message.content} | self._rest(each, result)
            for index, each in enumerate(result.generations)
        ]
        return {
            **self._fields(result.generations[0].generation_id),
            "choices": choices,
            "usage": fields.usage_of(result),
        }

    def opening(self, begun: Begun) -> Iterator[bytes]:
        """Yield nothing: the first event has text."""
        self._head = self._fields(begun.response_id)
        yield from ()

    def text(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events for more text."""
        self._unshown.sent(delta)
        if delta.content:
            yield self._chunk({"index": delta.index, "text": delta.content, "logprobs": None, "finish_reason": None})

    def ending(self, result: Result) -> Iterator[bytes]:
        """Yield the events that end the stream."""
        for index, each in enumerate(result.generations):
            rest = self._unshown.rest(index, each.message)
            yield self._chunk({"index": index, "text": rest.content} | self._rest(each, result))
        if self._body.include_usage:
            yield fields.event({**self._head, "choices": [], "usage": fields.usage_of(result)})
        yield fields.DONE

    failure = staticmethod(fields.failure)

    def _fields(self, identifier: str) -> dict[str, Any]:
        return {"id": identifier, "object": "text_completion", "created": self._created, "model": self._body.model}

    def _rest(self, generation: episode_pb2.EpisodeGeneration, result: Result) -> dict[str, Any]:
        sample = generation.sample
        logprobs = _logprobs(sample) if self._body.logprobs is not None else None
        rest = {"logprobs": logprobs} | fields.ending(sample, calls=False) | {"generation_id": generation.generation_id}
        if self._body.return_token_ids:
            rest |= fields.token_fields(sample) | {"prompt_token_ids": list(result.prompt_token_ids)}
        return rest

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        no_usage = {"usage": None} if self._body.include_usage else {}
        return fields.event({**self._head, "choices": [choice], **no_usage})


def _logprobs(sample: rollout_pb2.GeneratedSample) -> dict[str, Any]:
    return {
        "tokens": [fields.token_name(token) for token in sample.token_ids],
        "token_logprobs": [max(logprob, LEAST) for logprob in sample.logprobs],
        "top_logprobs": [
            {
                fields.token_name(token): max(logprob, LEAST)
                for token, logprob in zip(top.ids, top.logprobs, strict=True)
            }
            for top in sample.top_logprobs
        ]
        or None,
        "text_offset": [],
    }
