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

from sluice.config import ConfigError
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
    """The text of what is learned."""
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
        ({**user("x"), "loss": True}, "message 1 of the user has loss = True: only turns of the assistant are learned"),
        ({**assistant("x"), "loss": False}, "no assistant turn to learn"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(message: dict[str, Any], told: str) -> None:
    with pytest.raises(TemplateError, match=told):
        taught({"messages": [user("a"), message, *([assistant("y")] if message["role"] == "user" else [])]})


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


def test_a_turn_without_an_end_is_learned_whole() -> None:
    bare = "{% for message in messages %}{{ '<|im_start|>' + message.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    assert taught({"messages": [user("a"), assistant("one")]}, bare) == ["one\n"]


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
