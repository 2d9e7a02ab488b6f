"""A lower bound for the number of tokens of a text, from its bytes alone, to refuse too long texts before they are tokenized.

Each byte has a weight: one over the length of the longest token with this byte. The weights of the bytes of any token add up to at most
one, so the weights of a text add up to at most the number of its tokens.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Character that some vocabularies write for a space."""

_EVERY_CHARACTER = r"[\s\S]"

_SINGLE = [bytes([byte]) for byte in range(256)]


class LeastTokens:
    """Returns the minimum number of tokens of a text. If the kind of tokenizer is unknown, returns 0, so that every text is tokenized.

    Known kinds have a token for every byte, such as the tokenizers of Qwen and Llama, or a token for every character. Other tokenizers may
    turn a long text into one unknown token, or leave parts of it out.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._weights: Float64[np.ndarray, 256] | None = None
        self._composes = self._spaces = False
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            content = json.loads(backend.to_str())
            self._weights = _weights(content)
            self._spaces = bool(content["model"].get("byte_fallback"))
            self._composes = "NFC" in [each["type"] for each in _steps(content["normalizer"], "normalizers")]

    def __call__(self, text: str) -> int:
        """Return the lower bound."""
        if self._weights is None or (self._composes and not unicodedata.is_normalized("NFC", text)):
            return 0
        data = (text.replace(SPACE, " ") if self._spaces else text).encode(errors="replace")
        counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
        return math.floor(float(counts @ self._weights))


def _weights(content: Mapping[str, Any]) -> Float64[np.ndarray, 256] | None:
    """Return the weight of each byte; None if a text may have fewer tokens than the weights add up to."""
    added, model = content["added_tokens"], content["model"]
    steps = _steps(content["pre_tokenizer"], "pretokenizers")
    takes_spaces = any(each["lstrip"] or each["rstrip"] for each in added)
    if takes_spaces or _removes(content["normalizer"], steps):
        return None
    names = [each["content"] for each in added]
    if model["type"] == "WordLevel":
        return _weights_of_characters(model, steps, names)
    if model["type"] == "BPE" and not (model.get("end_of_word_suffix") or model.get("continuing_subword_prefix")):
        if model.get("byte_fallback"):
            return _weights_with_fallback(model["vocab"], names)
        if any(each["type"] == "ByteLevel" for each in steps):
            return _weights_of_bytes(model["vocab"], names)
    return None


def _weights_of_characters(
    model: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], names: Iterable[str]
) -> Float64[np.ndarray, 256] | None:
    """Return the weights for a tokenizer in which each character is one token, possibly the unknown token."""
    splits = len(steps) == 1 and steps[0].get("pattern") == {"Regex": _EVERY_CHARACTER}
    if not splits or model["unk_token"] not in model["vocab"]:
        return None
    weights = _shares([*_SINGLE, *(name.encode() for name in names)])
    weights[0x80:0xC0] = 0  # bytes that follow the first one of a character
    return weights


def _weights_of_bytes(vocabulary: Mapping[str, int], names: Iterable[str]) -> Float64[np.ndarray, 256] | None:
    """Return the weights for a tokenizer whose tokens are runs of bytes."""
    alphabet = _byte_alphabet()
    if not alphabet.keys() <= vocabulary.keys():
        return None
    tokens = (
        bytes(alphabet[each] for each in token) if alphabet.keys() >= {*token} else token.encode()
        for token in vocabulary
    )
    return _shares([*tokens, *(name.encode() for name in names)])


def _weights_with_fallback(vocabulary: Mapping[str, int], names: Iterable[str]) -> Float64[np.ndarray, 256] | None:
    """Return the weights for a tokenizer whose tokens are runs of characters, or single bytes of characters that are in no other token."""
    if not vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}:
        return None
    return _shares([*_SINGLE, *(token.replace(SPACE, " ").encode() for token in [*vocabulary, *names])])


def _steps(part: Mapping[str, Any] | None, members: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    return [step for each in part[members] for step in _steps(each, members)] if part["type"] == "Sequence" else [part]


def _removes(normalizer: Mapping[str, Any] | None, steps: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a text may lose some of its bytes, as far as is known."""
    for each in _steps(normalizer, "normalizers"):
        to_space = each["type"] == "Replace" and (each["pattern"], each["content"]) == ({"String": " "}, SPACE)
        if each["type"] not in {"NFC", "Prepend"} and not to_space:
            return True
    known = {"ByteLevel", "Split", "Digits", "Punctuation", "Metaspace"}
    return any(each["type"] not in known or each.get("behavior") == "Removed" for each in steps)


def _shares(tokens: Iterable[bytes]) -> Float64[np.ndarray, 256]:
    """Return for each byte one over the length of the longest token that has it; 0 for a byte that no token has."""
    longest = [0] * 256
    for token in tokens:
        for byte in {*token}:
            longest[byte] = max(longest[byte], len(token))
    return np.array([1 / each if each else 0.0 for each in longest])


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that byte-level vocabularies write for the 256 bytes, first used by GPT-2."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}
