"""Text that comes in parts is the text of all tokens at once, and costs no more than a fixed number of decodings per token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import TINY
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rollout_svc.tokenizer import ModelTokenizer
from sluice.cli.init_model import character_tokenizer

TEXTS = ["hello there, héllo again\n", "你好世界 🙂🙃", "e\u0301 \u200d family", "  two  spaces  "]


def bytes_of_pairs() -> PreTrainedTokenizerBase:
    """Byte-level pairs, where a character may be spread over several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(TEXTS * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def bytes_as_fallback() -> PreTrainedTokenizerBase:
    """Words with a mark for their space, and a token per byte for characters that the vocabulary lacks."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghilnorst,é",
        "▁a",
        "▁the",
        "ll",
    ]
    backend = Tokenizer(
        models.BPE({word: id_ for id_, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "bytes of pairs": bytes_of_pairs(),
    "bytes as fallback": bytes_as_fallback(),
    "characters": character_tokenizer(TINY),
}


def parts(prompts: ModelTokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Return the texts of consecutive parts, whose sizes repeat."""
    stream = prompts.text_stream(())
    texts, start = [], 0
    for turn in range(len(ids) + 1):
        end = start + sizes[turn % len(sizes)]
        texts.append(stream.after(ids[start:end], last=end >= len(ids)))
        if end >= len(ids):
            return texts
        start = end
    raise AssertionError("each part has at least one token")


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(data=st.data())
def test_parts_join_to_the_whole_text(name, data):
    tokenizer = TOKENIZERS[name]
    prompts = ModelTokenizer(tokenizer)
    size = len(tokenizer)
    some = st.lists(st.integers(0, size - 1), max_size=60)
    # Runs of few tokens meet what random ones seldom do: unfinished characters, runs of bytes, spaces and special tokens.
    few = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    written = st.sampled_from([tokenizer.encode(text, add_special_tokens=False) for text in TEXTS])
    runs = st.lists(st.one_of(some, st.lists(st.sampled_from(few), max_size=40), written), min_size=1, max_size=4)
    ids = [id_ for run in data.draw(runs) for id_ in run]
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    assert "".join(parts(prompts, ids, sizes)) == prompts.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_continuation_has_the_whole_text_wherever_it_was_cut(name, text):
    tokenizer = TOKENIZERS[name]
    prompts = ModelTokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(len(ids)):
        stream = prompts.text_stream(ids[:cut])
        texts = [
            stream.after([id_], last=position == len(ids) - 1) for position, id_ in enumerate(ids) if position >= cut
        ]
        assert "".join(texts) == prompts.decode(ids)


def test_a_character_is_given_out_when_it_is_complete():
    prompts = ModelTokenizer(TOKENIZERS["bytes of pairs"])
    alphabet = {
        character: id_ for character, id_ in TOKENIZERS["bytes of pairs"].get_vocab().items() if len(character) == 1
    }
    ids = [alphabet[character] for character in ("ð", "Ł", "Ļ", "Ģ", "a")]  # the bytes of an emoji, then a letter
    assert parts(prompts, ids, [1]) == ["", "", "", "\U0001f640", "a"]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["hello there, all ", "你好世界", "🙂"])
def test_tokens_are_decoded_a_fixed_number_of_times(name, text, monkeypatch):
    tokenizer = TOKENIZERS[name]
    prompts = ModelTokenizer(tokenizer)
    ids = tokenizer.encode(text * 300, add_special_tokens=False)
    decoded = 0
    decode = tokenizer.decode

    def counting(token_ids: list[int], **options: object) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return str(decode(token_ids, **options))

    monkeypatch.setattr(tokenizer, "decode", counting)
    given_out = "".join(parts(prompts, ids, [1]))
    assert decoded < 25 * len(ids)
    assert given_out == decode(ids, skip_special_tokens=True)
