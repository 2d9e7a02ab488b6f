"""What the dialects have in common, those of OpenAI above all: the body, sampling fields, parts of messages, log-probabilities, events."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from gateway_svc.capture import CapturedRequest, Inner, Lenient, Result, fault
from sluice.openai.dialect import (
    FINISH_REASONS,
    LEAST,
    MAX_ALTERNATIVES,
    NO_ALTERNATIVES,
    Bias,
    TokenId,
    Unsigned,
    refuse_not_finite,
    usage,
)
from sluice.openai.errors import error_body
from sluice.rpc import MAX_SAMPLES, SluiceError
from sluice.v1 import rollout_pb2, tokens_pb2
from sluice.versions import Version

DONE = b"data: [DONE]\n\n"

TEXT_PARTS = {"text", "input_text", "output_text", "summary_text", "reasoning_text"}

IMAGE_PARTS = {"image_url", "input_image"}

ROLES = {"developer": "system"}
"""Roles with another name in the contract."""


class RequestBody(Lenient):
    """Body of a request, in any dialect: a JSON object whose numbers are all finite."""

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_finite(cls, given: Any) -> Any:  # noqa: ANN401 - JSON
        return refuse_not_finite(given)


class StreamOptions(Inner):
    """Options of a streamed response."""

    include_usage: bool | None = None


class SamplingBody(RequestBody):
    """Parameters of Chat Completions and Completions. What is not here is ignored and counted."""

    model: str = ""
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Unsigned | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, lt=2**32)
    min_p: float | None = None
    min_tokens: Unsigned | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Unsigned, Bias] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    return_token_ids: bool | None = None

    def generate_request(self, max_tokens: int | None, top_logprobs: int) -> rollout_pb2.GenerateRequest:
        """Return the request of the contract, without its prompt."""
        names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        given = {name: getattr(self, name) for name in names}
        sampling = tokens_pb2.SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            max_tokens=max_tokens,
            top_k=max(self.top_k, 0) if self.top_k is not None else None,
            min_tokens=self.min_tokens or 0,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            logit_bias=self.logit_bias or {},
            seed=None if self.seed is None else self.seed % 2**64,
            top_logprobs=top_logprobs,
        )
        return rollout_pb2.GenerateRequest(sampling=sampling, n=self.n or 1)

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Url(Inner):
    """Where an image is."""

    url: str


class Part(Inner):
    """A part of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | Url | None = None


Content = str | list[Part] | None


def add_content(message: tokens_pb2.ChatMessage, content: Content, where: str, request: CapturedRequest) -> None:
    """Set the content of a message. Text in parts is joined; only a message with images keeps its parts.

    Raises:
        SluiceError: INVALID_ARGUMENT for a part that cannot be shown to the model.
    """
    if content is None or isinstance(content, str):
        message.content = content or ""
        return
    parts = [_part(each, f"{where}.content[{index}]", request) for index, each in enumerate(content)]
    if all(part.WhichOneof("part") == "text" for part in parts):
        message.content = "".join(part.text for part in parts)
    else:
        message.parts.extend(parts)


def _part(part: Part, where: str, request: CapturedRequest) -> tokens_pb2.ContentPart:
    if part.type in TEXT_PARTS and part.text is not None:
        return tokens_pb2.ContentPart(text=part.text)
    if part.type == "refusal":
        return tokens_pb2.ContentPart(text=part.refusal or "")
    if part.type in IMAGE_PARTS and part.image_url is not None:
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
        return tokens_pb2.ContentPart(image=_image(url, where))
    if part.type in TEXT_PARTS:
        request.note("ignored", "empty part")
        return tokens_pb2.ContentPart(text="")
    raise fault(
        where, f"a part of type {part.type[:64]!r} cannot be given to the model: send text or an image as a data: URL"
    )


def _image(url: str, where: str) -> bytes:
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise fault(where, "the gateway fetches no images: send it as a data: URL in base64")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise fault(where, f"the image is not base64: {error}") from error


Alternatives = Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)]


def logprob_content(sample: rollout_pb2.GeneratedSample) -> list[dict[str, Any]]:
    """Return one entry per token. A gateway has no tokenizer, so a token is named by its id, in the two forms that clients read."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": token_name(token), "token_id": token, "logprob": max(logprob, LEAST), "bytes": None}

    content = []
    for position, (token, logprob) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        top = sample.top_logprobs[position] if sample.top_logprobs else NO_ALTERNATIVES
        alternatives = [entry(*each) for each in zip(top.ids, top.logprobs, strict=True)]
        content.append(entry(token, logprob) | {"top_logprobs": alternatives})
    return content


def token_name(token: int) -> str:
    """Return the name of a token, as vLLM has it with `return_tokens_as_token_ids`."""
    return f"token_id:{token}"


def ending(sample: rollout_pb2.GeneratedSample, *, calls: bool) -> dict[str, Any]:
    """Return the fields that say why a choice ended."""
    reason = FINISH_REASONS.get(sample.finish_reason)
    return {
        "finish_reason": "tool_calls" if calls and reason == "stop" else reason,
        "stop_reason": sample.stop_string or None,
    }


def token_fields(sample: rollout_pb2.GeneratedSample) -> dict[str, Any]:
    """Return the ids of a choice and the versions that sampled them."""
    spans = [
        {"start": span.start, "version": str(Version.from_proto(span.policy_version))} for span in sample.version_spans
    ]
    return {"token_ids": list(sample.token_ids), "version_spans": spans}


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


def failure(error: SluiceError) -> bytes:
    """Return the event of an error after which a stream of Chat Completions or Completions ends."""
    return event(error_body(error))
