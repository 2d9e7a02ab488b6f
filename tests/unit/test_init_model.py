"""`sluice init-model` writes a directory that transformers loads, and never overwrites one."""

from __future__ import annotations

import pytest
import torch
from tiny_policy import TINY, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rollout_svc.replies import Call, read_json_calls, reply_format
from sluice.cli.init_model import DEFAULT_CHARACTERS, ModelShape, character_tokenizer, run, vocabulary
from sluice.cli.main import main
from sluice.render import ChatRenderer

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


PRICE = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Price of an item.",
        "strict": True,
        "parameters": {
            "type": "object",
            "title": "price_args",
            "properties": {"item": {"title": "Item", "type": "string"}, "day": {"anyOf": [{"type": "integer"}]}},
            "required": ["item"],
            "additionalProperties": False,
        },
    },
}
ASKED = {"role": "user", "content": "ink or cup?"}


def calls_of(*items: str) -> dict[str, object]:
    """A turn that asks for the price of each item."""
    calls = [
        {"id": item, "type": "function", "function": {"name": "price", "arguments": f'{{ "item": "{item}"}}'}}
        for item in items
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(item: str, price: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": item, "content": price}


def test_without_tools_the_ids_are_those_of_roles_characters_and_end_tokens():
    """Models that were written before the template had tools have the same ids."""
    messages = [{"role": "system", "content": "s"}, ASKED, {"role": "assistant", "content": "cup"}]
    ids = ChatRenderer(character_tokenizer(TINY)).render(messages)
    assert ids == [2, *at("s"), 1, 3, *at("ink or cup?"), 1, 4, *at("cup"), 1, 4]


def at(text: str) -> list[int]:
    return [7 + DEFAULT_CHARACTERS.index(character) for character in text]


def test_tools_are_signatures_and_calls_are_json_between_two_tokens():
    renderer = ChatRenderer(character_tokenizer(TINY))
    text = renderer.text([ASKED, calls_of("ink", "cup"), result("ink", "7")], tools=[PRICE, {"name": "end"}])
    assert text == (
        "<|system|>price(day?, item: string) Price of an item.\nend()<|end|><|user|>ink or cup?<|end|><|assistant|>"
        '<tool_call>{"name":"price","arguments":{"item":"ink"}}</tool_call>'
        '<tool_call>{"name":"price","arguments":{"item":"cup"}}</tool_call><|end|><|tool|>7<|end|><|assistant|>'
    )
    start, end = len(renderer.tokenizer) - 2, len(renderer.tokenizer) - 1
    ids = renderer.encode(text)
    assert (ids.count(start), ids.count(end)) == (2, 2)
    assert renderer.tokenizer.decode(ids, skip_special_tokens=True).count("<tool_call>{") == 2
    assert renderer.tokenizer.decode(ids) == text


def test_a_call_is_read_back_as_it_was_written():
    tokenizer = character_tokenizer(TINY)
    assert reply_format(tokenizer, "auto", "auto").tool_parser == "json"
    renderer = ChatRenderer(tokenizer)
    rendered = renderer.render_sft([ASKED, calls_of("ink"), result("ink", "7"), calls_of("cup")], [PRICE])
    learned = [id_ for id_, learns in zip(rendered.ids, rendered.loss_mask, strict=True) if learns]
    first, second, rest = tokenizer.decode(learned).split("<|end|>")
    assert read_json_calls(first, [PRICE]).calls == [Call("price", '{"item":"ink"}')]
    assert read_json_calls(second, [PRICE]).calls == [Call("price", '{"item":"cup"}')]
    assert not rest


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_results_are_appended_to_the_sampled_call_also_where_it_was_cut(cut):
    """An end token, an end of the call, and the last brace may be missing. No sampled token is encoded again."""
    renderer = ChatRenderer(character_tokenizer(TINY))
    turns = [calls_of("ink", "cup"), result("ink", "7"), result("cup", "3"), calls_of("pen"), result("pen", "12")]
    conversation = [ASKED]
    ids = renderer.render(conversation, tools=[PRICE])
    for index in (1, 4):
        turn, *results = turns[0:3] if index == 1 else turns[3:]
        sampled = renderer.encode(renderer.text([*conversation, turn], add_generation_prompt=False, tools=[PRICE]))
        sampled = sampled[len(renderer.render(conversation, tools=[PRICE])) : len(sampled) - cut]
        ids += sampled
        before, conversation = list(ids), [*conversation, turn]
        ids = renderer.render_continuation(ids, results, earlier=conversation, tools=[PRICE])
        conversation += results
        assert ids[: len(before)] == before
        tail = renderer.tokenizer.decode(ids[len(before) :])
        assert tail == ("" if cut == 0 else "<|end|>") + "".join(f"<|tool|>{r['content']}<|end|>" for r in results) + (
            "<|assistant|>"
        )
    if cut == 0:
        assert ids == renderer.render(conversation, tools=[PRICE])


def test_a_tool_has_one_form_whatever_a_framework_adds_to_its_schema():
    renderer = ChatRenderer(character_tokenizer(TINY))
    properties = {"item": {"type": "string"}, "day": {"anyOf": [{"type": "integer"}]}}
    plain = {"type": "object", "required": ["item"], "properties": properties}
    described = {"type": "function", "function": {**PRICE["function"], "parameters": plain}}
    assert renderer.render([ASKED], tools=[PRICE]) == renderer.render([ASKED], tools=[described])
