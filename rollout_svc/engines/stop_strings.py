"""Finds stop strings in what was sampled, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Decoder", "completed_stop"]

CHARACTERS_PER_TOKEN = 4
"""A character takes up to four tokens in byte-level vocabularies."""

SLACK_TOKENS = 16
"""Further tokens to look back, for special ones that decode to nothing."""


class Decoder(Protocol):
    """A tokenizer, as far as it is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        ...


def completed_stop(decoder: Decoder, token_ids: Sequence[int], stops: Sequence[str]) -> str:
    """The stop string that the last token completed, the one that begins first if there are several; empty if none.

    Only as much of the end is decoded as the longest stop string can reach back.
    """
    reach = CHARACTERS_PER_TOKEN * max(map(len, stops)) + SLACK_TOKENS
    text = decoder.decode(list(token_ids[-reach:]), skip_special_tokens=True)
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else ""
