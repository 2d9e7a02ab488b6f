"""`sluice init-model` writes a directory that transformers loads, and never overwrites one."""

from __future__ import annotations

import pytest
import torch
from tiny_policy import TINY, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sluice.cli.init_model import DEFAULT_CHARACTERS, ModelShape, character_tokenizer, run, vocabulary
from sluice.cli.main import main

ARGUMENTS = ["--hidden", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--mlp", "16"]


def test_the_defaults_make_the_small_model_that_learns():
    assert len(vocabulary(DEFAULT_CHARACTERS)) == 128
    assert vocabulary(DEFAULT_CHARACTERS)[:6] == [
        "<|pad|>",
        "<|end|>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|tool|>",
    ]
    shape = ModelShape()
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.mlp) == (
        128,
        3,
        4,
        2,
        32,
        384,
    )


def test_a_written_model_generates_until_its_end_token(tmp_path, capsys):
    assert run([str(tmp_path / "m"), *ARGUMENTS, "--tie"]) == 0
    assert "vocabulary 128" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert len(tokenizer) == model.config.vocab_size == 128
    assert model.config.tie_word_embeddings
    assert GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id == tokenizer.eos_token_id == 1
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    assert model.generate(**ids, max_new_tokens=3).shape[1] <= ids["input_ids"].shape[1] + 3


def test_every_character_survives_a_round_trip_and_unknown_ones_become_unk():
    tokenizer = character_tokenizer(TINY)
    ids = tokenizer.encode(DEFAULT_CHARACTERS, add_special_tokens=False)
    assert len(ids) == len(DEFAULT_CHARACTERS)
    assert tokenizer.decode(ids) == DEFAULT_CHARACTERS
    assert tokenizer.decode(tokenizer.encode("aüb", add_special_tokens=False)) == "a<|unk|>b"


def test_the_seed_decides_the_weights(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run([str(tmp_path / name), *ARGUMENTS, "--seed", str(seed)])
    weights = {n: AutoModelForCausalLM.from_pretrained(tmp_path / n).lm_head.weight for n in "abc"}
    assert torch.equal(weights["a"], weights["b"])
    assert not torch.equal(weights["a"], weights["c"])


def test_an_existing_directory_stays_as_it_is(tmp_path, capsys):
    tiny_model(tmp_path)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "tiny").iterdir())
    assert run([str(tmp_path / "tiny")]) == 2
    assert "remove it or choose another directory" in capsys.readouterr().err
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "tiny").iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-heads", "3"], "multiple of kv_heads"),
        (["--head-dim", "7"], "even"),
        (["--layers", "0"], "--layers: give a whole number from 1"),
        (["--hidden", "1e9"], "--hidden: give a whole number from 1"),
        (["--vocab-chars", "a"], "two characters"),
    ],
)
def test_impossible_shapes_are_refused(tmp_path, capsys, arguments, message):
    assert main(["init-model", str(tmp_path / "m"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
