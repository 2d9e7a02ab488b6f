"""Which tokens of a row are learned, and which rows a demonstration becomes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_render import CHATML, THINKING, assistant, user, word_piece
from transformers import GenerationConfig

from sluice.config import ConfigError
from sluice.end_tokens import find_end_tokens
from sluice.environments.datasets import rows
from sluice.render import ChatRenderer, Rendered, TemplateError
from trainer_svc.offline.data import load_examples, render_demonstration, render_pair

REASONS = (  # as Qwen3's: reasoning stands in the last turn of the assistant only
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content and loop.last %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOWS_TOOLS = "{{ tools | tojson if tools }}" + CHATML


def learned(renderer: ChatRenderer, rendered: Rendered) -> str:
    """Return the text of the tokens that are trained."""
    return renderer.tokenizer.decode(
        [id_ for id_, wanted in zip(rendered.ids, rendered.loss_mask, strict=True) if wanted]
    )


def taught(row: dict[str, Any], template: str = CHATML) -> list[str]:
    """What each example of a row teaches."""
    renderer = ChatRenderer(word_piece(template))
    return [learned(renderer, rendered) for (rendered,) in render_demonstration(renderer, row)]


def test_turns_of_a_prompt_are_not_learned() -> None:
    prompt = [user("a"), assistant("one"), user("b")]
    assert taught({"prompt": prompt, "completion": [assistant("two")]}) == ["two<|im_end|>"]
    assert taught({"messages": [*prompt, assistant("two")]}) == ["one<|im_end|>two<|im_end|>"]
    renderer = ChatRenderer(word_piece(CHATML))
    ((chosen, rejected),) = render_pair(
        renderer, {"prompt": prompt, "chosen": [assistant("two")], "rejected": [assistant("three")]}
    )
    assert (learned(renderer, chosen), learned(renderer, rejected)) == ("two<|im_end|>", "three<|im_end|>")


@pytest.mark.parametrize(
    ("field", "no", "yes"), [("weight", 0, 1), ("weight", 0.0, 1.0), ("loss", False, True), ("train", False, None)]
)
def test_a_message_says_whether_it_is_learned(field: str, no: object, yes: object) -> None:
    messages = [user("a"), {**assistant("bad"), field: no}, {**user("b"), field: no}, {**assistant("good"), field: yes}]
    assert taught({"messages": messages}) == ["good<|im_end|>"]
    assert taught({"messages": messages}, THINKING + "{{ messages[0].weight }}") == [
        "<think>\n\n</think>\n\ngood<|im_end|>"
    ]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({**assistant("x"), "weight": 0.5}, r"message 1 has weight = 0\.5: a turn is learned \(1, true\) or not"),
        ({**assistant("x"), "train": "yes"}, "message 1 has train = 'yes'"),
        ({**assistant("x"), "loss": False}, "no turn to learn"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(message: dict[str, Any], told: str) -> None:
    with pytest.raises(TemplateError, match=told):
        taught({"messages": [user("a"), message]})


def test_a_row_is_split_where_the_template_drops_earlier_reasoning() -> None:
    thought = [{**assistant(text), "reasoning_content": f"so {text}"} for text in ("one", "two", "three")]
    messages = [user("a"), thought[0], user("b"), {**thought[1], "weight": 0}, user("c"), thought[2]]
    renderer = ChatRenderer(word_piece(REASONS))
    examples = render_demonstration(renderer, {"messages": messages})
    assert [learned(renderer, each) for (each,) in examples] == [
        "<think>so one</think>one<|im_end|>",
        "<think>so three</think>three<|im_end|>",
    ]
    # What precedes a turn is what the model sees when it samples it.
    last = examples[1][0]
    assert last.ids[: last.loss_mask.index(True)] == renderer.render(messages[:-1])


def test_each_example_of_a_split_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    messages = [user("a"), assistant("one"), user("b"), assistant("two")]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    render = partial(render_demonstration, ChatRenderer(word_piece(THINKING)))
    assert len(load_examples(str(path), "train", render, max_length=96, drop_long=False)) == 2


@pytest.mark.parametrize("eos", ["<|im_start|>", None])
def test_nothing_is_learned_after_an_end_that_is_not_the_tokenizers(eos: str | None) -> None:
    tokenizer = word_piece(CHATML)
    tokenizer.eos_token = eos
    renderer = ChatRenderer(tokenizer)
    ((rendered,),) = render_demonstration(renderer, {"messages": [user("a"), assistant("one")]})
    assert learned(renderer, rendered) == "one<|im_end|>"


NO_ENDS = "{% for message in messages %}{{ '<|im_start|>' + message.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"


def test_a_turn_without_an_end_gets_one() -> None:
    assert taught({"messages": [user("a"), assistant("one")]}, NO_ENDS) == ["one\n<|im_end|>"]


def test_a_turn_that_ends_where_the_next_one_begins_teaches_that_token() -> None:
    """As with GLM-4, whose generation configuration names the token with which the user's turn begins."""
    tokenizer = word_piece(NO_ENDS)
    ends = find_end_tokens(tokenizer, GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>")))
    renderer = ChatRenderer(tokenizer, ends=ends)
    messages = [user("a"), assistant("one"), user("b"), assistant("two")]
    ((rendered,),) = render_demonstration(renderer, {"messages": messages})
    assert learned(renderer, rendered) == "one\n<|im_start|>two\n<|im_end|>"


def test_a_model_without_any_end_is_refused() -> None:
    tokenizer = word_piece(NO_ENDS)
    tokenizer.eos_token = None
    for row in ({"messages": [user("a"), assistant("one")]}, {"prompt": "a", "completion": "one"}):
        with pytest.raises(TemplateError, match=r"no token ends a turn.*set eos_token of the tokenizer") as refused:
            render_demonstration(ChatRenderer(tokenizer), row)
        assert "\n" not in str(refused.value)


def test_nothing_of_a_text_is_learned_after_its_end() -> None:
    (once,) = taught({"prompt": "a", "completion": "one<|im_end|>"})
    (cut,) = taught({"prompt": "a", "completion": "one<|im_end|>two"})
    assert once == cut == "one<|im_end|>"


def test_padding_that_is_the_end_token_is_learned_as_the_end() -> None:
    tokenizer = word_piece(CHATML)
    tokenizer.pad_token = tokenizer.eos_token
    ((rendered,),) = render_demonstration(ChatRenderer(tokenizer), {"messages": [user("a"), assistant("one")]})
    assert learned(ChatRenderer(tokenizer), rendered) == "one<|im_end|>"
    assert rendered.ids.count(tokenizer.pad_token_id) == 2  # the user's turn ends with it too, and is not learned


TOOL = {"role": "tool", "content": "42"}


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        (["assistant"], "one<|im_end|>two<|im_end|>"),
        (["assistant", "tool"], "one<|im_end|>42<|im_end|>two<|im_end|>"),
        (["tool"], "42<|im_end|>"),
        (["user", "system"], "be kind<|im_end|>a<|im_end|>"),
    ],
)
def test_the_roles_to_learn_are_those_of_the_setting(roles: list[str], text: str) -> None:
    renderer = ChatRenderer(word_piece(CHATML))
    messages = [{"role": "system", "content": "be kind"}, user("a"), assistant("one"), TOOL, assistant("two")]
    ((rendered,),) = render_demonstration(renderer, {"messages": messages}, roles)
    assert learned(renderer, rendered) == text
    shown = renderer.tokenizer.decode(rendered.ids)
    assert renderer.text(messages, add_generation_prompt=False).startswith(shown.removesuffix("\n"))


def test_a_message_wins_over_the_roles_to_learn() -> None:
    renderer = ChatRenderer(word_piece(CHATML))
    messages = [{**user("a"), "train": True}, assistant("one"), {**TOOL, "weight": 0}, assistant("two")]
    ((rendered,),) = render_demonstration(renderer, {"messages": messages}, ["tool"])
    assert learned(renderer, rendered) == "a<|im_end|>"


def test_a_learned_turn_keeps_the_tokens_of_the_whole_text() -> None:
    """A tokenizer may merge the end of the head with the content: the trained ids must be the ids that the model is shown."""
    renderer = ChatRenderer(word_piece(CHATML))
    messages = [user("\n\nwhat is the answer?"), assistant("hello")]
    ((rendered,),) = render_demonstration(renderer, {"messages": messages}, ["user", "assistant"])
    prompt = renderer.render(messages[:1])
    assert rendered.ids[: len(prompt)] == prompt


def test_a_learned_turn_whose_content_the_template_leaves_out_is_refused() -> None:
    hides = CHATML.replace("message.content", "('hidden' if message.role == 'tool' else message.content)")
    renderer = ChatRenderer(word_piece(hides))
    with pytest.raises(
        TemplateError, match="message 1 of the tool is to be learned, but the chat template does not write"
    ):
        render_demonstration(renderer, {"messages": [user("a"), TOOL, assistant("one")]}, ["tool"])


SEPARATORS = "one\u2028two\u2029three\u0085four\x0bfive\x1csix"


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"messages": [user(SEPARATORS), assistant("yes")], "question": SEPARATORS, "answer": "yes"}
    path.write_bytes(("\ufeff" + json.dumps(row, ensure_ascii=False) + "\r\n\n").encode() * 1)
    assert list(rows(str(path), "train")) == [row]
    render = partial(render_demonstration, ChatRenderer(word_piece(CHATML)))
    assert len(load_examples(str(path), "train", render, max_length=256, drop_long=False)) == 1
    path.write_text(json.dumps(row) + '\n{"a": }\n')
    with pytest.raises(ConfigError, match=r"line 2 of .*rows\.jsonl is not JSON: .* column 7"):
        list(rows(str(path), "train"))


def test_nulls_that_arrow_adds_are_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}},
        {"type": "function", "function": {"name": "g", "parameters": {"properties": {"s": {"type": "string"}}}}},
    ]
    given = [{"messages": [user("a"), assistant("one")], "tools": [tool]} for tool in tools]
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(given), folder / "train.parquet")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    render = partial(render_demonstration, ChatRenderer(word_piece(SHOWS_TOOLS)))
    read = [load_examples(str(each), "train", render, max_length=512, drop_long=False) for each in (folder, path)]
    ids = [[examples.rows(index)[0].input_ids.tolist() for index in range(2)] for examples in read]
    assert ids[0] == ids[1]
