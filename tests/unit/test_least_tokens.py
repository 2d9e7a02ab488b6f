"""The lower bound of a text's tokens never exceeds their number, and is close enough to refuse what is far too long."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_policy import TINY
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout_svc.least_tokens import SPACE, LeastTokens
from rollout_svc.tokenizer import ModelTokenizer
from sluice.cli.init_model import character_tokenizer
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2

CORPUS = [
    "the quick brown fox jumps over the lazy dog " * 4,
    " " * 64 + "=" * 40 + "\n\n\n",
    "e\u0301\u0327 \u1e09 \uac00\u1112\u1161\u11ab ▁▁▁▁ ☃☃☃☃ aaaaaaaaaaaaaaaa",
]
NAMES = ["<|end|>", "<|a longer name of a token|>"]


def fast(backend: Tokenizer, **added: bool) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(name, normalized=False, **added) for name in NAMES])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@cache
def of_bytes(normalizer: str = "") -> PreTrainedTokenizerFast:
    """As Llama's and, with a normalizer, Qwen's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?\w+| +|[^\w ]+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    if normalizer:
        backend.normalizer = getattr(normalizers, normalizer)()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return fast(backend)


@cache
def with_fallback() -> PreTrainedTokenizerFast:
    """As Gemma's and Llama 2's: spaces are written as another character, and unknown characters as bytes."""
    pieces = [*"abcdefghijklmnopqrstuvwxyz\n=", SPACE, SPACE * 2, SPACE * 4, "☃", "☃☃"]
    merges = [(SPACE, SPACE), (SPACE * 2, SPACE * 2), ("☃", "☃")]
    vocabulary = {text: id_ for id_, text in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.ByteFallback()
    return fast(backend)


TOKENIZERS = {
    "bytes": of_bytes,
    "composed": lambda: of_bytes("NFC"),
    "fallback": with_fallback,
    "characters": lambda: character_tokenizer(TINY),
}
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.text(" =a\n▁☃é\u0301\u0338>", max_size=40),
        st.sampled_from([*NAMES, "<|user|>", " " * 64, "=" * 40, "K\u212b\u1100\u1161\u11a8", "<0x41>"]),
    ),
    max_size=8,
).map("".join)


@cache
def bound(name: str) -> tuple[PreTrainedTokenizerFast, LeastTokens]:
    tokenizer = TOKENIZERS[name]()
    return tokenizer, LeastTokens(tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@example(text="<|end|>\u0338")
@example(text=SPACE * 4)
@example(text=" " * 64)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer, least = bound(name)
    assert least(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_large_text_has_many(name: str) -> None:
    _, least = bound(name)
    assert least("the quick brown fox " * 1000) > 1000


def test_of_tokenizers_that_may_leave_text_out_nothing_is_claimed() -> None:
    removing = of_bytes("Strip")
    unknown = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    greedy = Tokenizer.from_str(of_bytes().backend_tokenizer.to_str())
    greedy.add_special_tokens([AddedToken("<|greedy|>", lstrip=True)])
    partial = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    partial.pre_tokenizer = pre_tokenizers.ByteLevel()
    for backend in (removing.backend_tokenizer, unknown, words, greedy, partial):
        assert LeastTokens(PreTrainedTokenizerFast(tokenizer_object=backend))("a b " * 1000) == 0


async def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_tokenized(monkeypatch) -> None:
    prompts = ModelTokenizer(character_tokenizer(TINY))
    content = "x" * 4_000_000

    def tokenize(*_: object) -> list[int]:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr("sluice.control_tokens.ControlTokens.encode", tokenize)
    monkeypatch.setattr("sluice.render.ChatRenderer.encode", tokenize)
    conversation = {"messages": [{"role": "user", "content": content}]}
    for wire in (
        rollout_pb2.GenerateRequest(conversation=conversation),
        rollout_pb2.GenerateRequest(text=content),
        rollout_pb2.GenerateRequest(
            conversation={
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": content},
                ]
            },
            continues={"token_ids": [3, 7, 1], "messages": 2},
        ),
    ):
        with pytest.raises(SluiceError, match="tokens at least; at most 99 fit this model"):
            await prompts.prompt_of(wire, 99)


async def test_a_prompt_that_fits_exactly_passes() -> None:
    prompts = ModelTokenizer(character_tokenizer(TINY))
    ids = (await prompts.prompt_of(rollout_pb2.GenerateRequest(text="x" * 99), 99)).ids
    assert len(ids) == 99
    with pytest.raises(SluiceError):
        await prompts.prompt_of(rollout_pb2.GenerateRequest(text="x" * 100), 99)
