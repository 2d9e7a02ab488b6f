"""Token ids in, token ids out, as vLLM and renderers speak it: `POST /inference/v1/generate`, at the root of the server."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from sluice.openai.fields import (
    Alternatives,
    ClientRequest,
    RequestBody,
    SamplingBody,
    TokenId,
    ending,
    fault,
    logprob_content,
)
from sluice.openai.shown import Result

NAME = "tokens.generate"


class SamplingParameters(SamplingBody):
    """Sampling by vLLM's names."""

    logprobs: Alternatives | None = None
    prompt_logprobs: Any = None


class TokensBody(RequestBody):
    """Body of a request."""

    model: str = ""
    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: SamplingParameters = Field(default_factory=SamplingParameters)
    stream: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)


def parse(body: TokensBody) -> ClientRequest:
    """Return what a body asks for.

    Raises:
        SluiceError: INVALID_ARGUMENT with the field at fault.
    """
    sampling = body.sampling_params
    generate = sampling.generate_request(sampling.max_tokens, sampling.logprobs or 0)
    generate.token_ids.ids.extend(body.token_ids)
    generate.priority = body.priority or 0
    request = ClientRequest(NAME, body.model, generate)
    body.note_unknown(request)
    sampling.note_unknown(request)
    if body.stream:
        raise fault(
            "stream", "is not supported here: leave it out, or use /v1/completions with token ids as the prompt"
        )
    return request


def whole(result: Result) -> dict[str, Any]:
    """Return the JSON of a response. Log-probabilities are always there: clients of this route train."""
    choices = [
        {
            "index": index,
            "token_ids": list(each.sample.token_ids),
            "logprobs": {"content": logprob_content(each.sample)},
            "generation_id": each.generation_id,
        }
        | ending(each.sample, calls=False)
        for index, each in enumerate(result.generations)
    ]
    head = {"request_id": result.generations[0].generation_id.rpartition("/")[0]}
    return head | {"choices": choices, "prompt_token_ids": list(result.prompt_token_ids)}
