"""Prompts that are not conversations: OpenAI's Completions, and a route with token ids in and out.

`POST /v1/completions` takes a text or token ids. A replica also takes several prompts, and makes a request of each, so that each choice
has its own `prompt_token_ids`. `POST /inference/v1/generate`, at the root of a gateway, is the route of vLLM and renderers for token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from sluice.openai import answers, bodies
from sluice.openai.answers import LEAST, Begun, Delta, Result, TokenText
from sluice.openai.bodies import ClientRequest, TokenId, fault, inconsistent
from sluice.v1 import rollout_pb2, tokens_pb2

NAME = "openai.completions"
TOKENS_NAME = "tokens.generate"

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for `/v1/completions`. `/v1/chat/completions` has no default: the context is the limit."""

MAX_PROMPTS = 256
"""Maximum number of prompts in one request."""

MAX_COMPLETIONS = 1024
"""Maximum number of samples of one request, over all of its prompts."""


class CompletionBody(bodies.SamplingBody):
    """Body of a request."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: bodies.Alternatives | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts, each as text or as token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class StrictCompletionBody(bodies.StrictSamplingBody, CompletionBody, extra="forbid"):
    """Body of a request to a replica."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    echo: Literal[False] | None = None
    best_of: int | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _all_samples_are_returned(self) -> Self:
        if self.best_of not in {None, self.n or 1}:
            raise inconsistent("best_of", "must equal n: samples are not ranked here")
        if len(self.prompts) * (self.n or 1) > MAX_COMPLETIONS:
            text = f"{len(self.prompts)} prompts with n = {self.n} are more than {MAX_COMPLETIONS} samples"
            raise inconsistent("n", text)
        return self


def parse(body: CompletionBody) -> ClientRequest:
    """Return the request of a body with one prompt.

    Raises:
        SluiceError: INVALID_ARGUMENT with the field at fault.
    """
    if body.echo:
        raise fault("echo", "is not supported: the prompt is not returned; leave it out")
    if body.suffix:
        raise fault("suffix", "is not supported: only the end of a text can be sampled; leave it out")
    if len(body.prompts) > 1:
        raise fault(
            "prompt", f"has {len(body.prompts)} prompts, and a recorded request has one: send a request for each"
        )
    return parse_each(body)[0]


def parse_each(body: CompletionBody) -> list[ClientRequest]:
    """Return one request per prompt."""
    requests = []
    for prompt in body.prompts:
        max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        generate = body.generate_request(max_tokens, body.logprobs or 0)
        if isinstance(prompt, str):
            generate.text = prompt
        else:
            generate.token_ids.ids.extend(prompt)
        requests.append(ClientRequest(NAME, body.model or "", generate, bool(body.stream)))
        body.note_unknown(requests[-1])
    return requests


class CompletionReply(answers.OpenAIReply[CompletionBody]):
    """Writes the response to one request; see `OpenAIReply`."""

    prefix = "cmpl-"
    kinds = ("text_completion", "text_completion")
    choices_have_prompts = True

    def __init__(self, body: CompletionBody, model: str | None = None, token_text: TokenText | None = None) -> None:
        super().__init__(body, model, token_text)
        self._offsets: dict[int, int] = {}

    def choice(
        self,
        index: int,
        sample: rollout_pb2.GeneratedSample,
        message: tokens_pb2.ChatMessage,
        prompt_ids: Sequence[int] | None,
        generation_id: str = "",
    ) -> dict[str, Any]:
        """Return a whole choice, with a message of `visible_message`."""
        return self._choice(index, sample, message.content, prompt_ids, generation_id)

    def begin(self, indices: Sequence[int], prompt_ids: Sequence[int] | None = None) -> Iterator[bytes]:
        """Yield nothing: the first chunk has tokens."""
        del indices, prompt_ids
        yield from ()

    def part(
        self, index: int, new: rollout_pb2.GeneratedSample, shown: Delta, prompt_ids: Sequence[int] | None
    ) -> bytes:
        """Return the chunk for the next tokens of a choice, at a replica."""
        return self._chunk(self._choice(index, new, shown.content, prompt_ids))

    def opening(self, begun: Begun) -> Iterator[bytes]:
        """Yield nothing: the first event has text."""
        self.set_id(begun.response_id)
        yield from ()

    def text(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events for more text."""
        self._unshown.sent(delta)
        if delta.content:
            choice = {"index": delta.index, "text": delta.content, "logprobs": None, "finish_reason": None}
            yield self._chunk(choice)

    def ending(self, result: Result) -> Iterator[bytes]:
        """Yield the events that end the stream."""
        for index, each in enumerate(result.generations):
            rest = self._unshown.rest(index, each.message)
            yield self._chunk(
                self._choice(index, each.sample, rest.content, result.prompt_token_ids, each.generation_id)
            )
        yield from self.end(answers.usage_of(result))

    def _choice(
        self,
        index: int,
        sample: rollout_pb2.GeneratedSample,
        text: str,
        prompt_ids: Sequence[int] | None,
        generation_id: str = "",
    ) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            offset = self._offsets.get(index, 0)
            logprobs, self._offsets[index] = completion_logprobs(sample, self._token_text, offset)
        choice = {"index": index, "text": text, "logprobs": logprobs}
        ending = self._end_fields(sample, generation_id, calls=False)
        return choice | ending | self.prompt(prompt_ids, of_choice=True)


def completion_logprobs(
    sample: rollout_pb2.GeneratedSample, token_text: TokenText | None, offset: int
) -> tuple[dict[str, Any], int]:
    """Return the `logprobs` of a choice, and the offset of the end of its text.

    Args:
        sample: A sample, or its tokens in one chunk.
        token_text: Returns the text of a token. None: tokens are named by their ids, and their offsets are unknown.
        offset: Characters of the choice's text before these tokens.
    """
    name = token_text or answers.token_name
    texts = [name(token) for token in sample.token_ids]
    offsets = []
    for text in texts if token_text is not None else ():
        offsets.append(offset)
        offset += len(text)
    top: list[dict[str, float]] = []
    for text, logprob, each in zip(texts, sample.logprobs, sample.top_logprobs, strict=False):
        alternatives = zip(each.ids, each.logprobs, strict=True)
        sampled = {text: max(logprob, LEAST)} if token_text is not None else {}
        top.append({name(token): max(value, LEAST) for token, value in alternatives} | sampled)
    return {
        "tokens": texts,
        "token_logprobs": [max(logprob, LEAST) for logprob in sample.logprobs],
        "top_logprobs": top or None,
        "text_offset": offsets,
    }, offset


class SamplingParameters(bodies.SamplingBody):
    """Sampling parameters by vLLM's names."""

    logprobs: bodies.Alternatives | None = None
    prompt_logprobs: Any = None


class TokensBody(bodies.RequestBody):
    """Body of a request to the route for token ids."""

    model: str = ""
    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: SamplingParameters = Field(default_factory=SamplingParameters)
    stream: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)


def parse_tokens(body: TokensBody) -> ClientRequest:
    """Return the request of a body.

    Raises:
        SluiceError: INVALID_ARGUMENT with the field at fault.
    """
    sampling = body.sampling_params
    generate = sampling.generate_request(sampling.max_tokens, sampling.logprobs or 0)
    generate.token_ids.ids.extend(body.token_ids)
    generate.priority = body.priority or 0
    request = ClientRequest(TOKENS_NAME, body.model, generate)
    body.note_unknown(request)
    sampling.note_unknown(request)
    if body.stream:
        raise fault(
            "stream", "is not supported here: leave it out, or use /v1/completions with token ids as the prompt"
        )
    return request


def whole_tokens(result: Result) -> dict[str, Any]:
    """Return the JSON of a response with token ids. It always has log-probabilities, because clients of this route train."""
    choices = [
        {
            "index": index,
            "token_ids": list(each.sample.token_ids),
            "logprobs": {"content": answers.logprob_content(each.sample)},
            "generation_id": each.generation_id,
        }
        | answers.ending(each.sample, calls=False)
        for index, each in enumerate(result.generations)
    ]
    head = {"request_id": result.generations[0].generation_id.rpartition("/")[0]}
    return head | {"choices": choices, "prompt_token_ids": list(result.prompt_token_ids)}
