"""Log-probabilities in OpenAI's two shapes.

They are those of the policy as it was sampled, after temperature. There is one entry per sampled token, the end token
and those of a stop string included, although the text leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sluice.v1 import rollout_pb2, tokens_pb2

__all__ = ["TokenText", "chat_logprobs", "completion_logprobs"]

LEAST = -9999.0
"""Stands for the logarithm of zero, which JSON cannot say; OpenAI's own value."""

NO_ALTERNATIVES = tokens_pb2.TopLogprobs()

TokenText = Callable[[int], str]
"""Text of one token, special ones included."""


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
