"""The renderer only appends, masks exactly the assistant's tokens, and says when a template makes that impossible."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import TINY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sluice.cli.init_model import DEFAULT_CHARACTERS, character_tokenizer
from sluice.render import ChatRenderer, TemplateArgumentError, TemplateError, template_variables, tokenizer_digest

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (  # as Qwen3's: an empty reasoning block stands in the last assistant turn only
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDES_HISTORY = "{{ '<|im_start|>' + messages[-1].role + messages[-1].content + '<|im_end|>' }}"


def word_piece(template: str) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer that merges, so that encoding in pieces and at once can differ."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["hello there, hello again\n", "what is the answer?\n\n"] * 50, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


@pytest.fixture(scope="module")
def characters() -> ChatRenderer:
    return ChatRenderer(character_tokenizer(TINY))


@pytest.fixture(scope="module")
def chatml() -> ChatRenderer:
    return ChatRenderer(word_piece(CHATML))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


texts = st.text(st.sampled_from(DEFAULT_CHARACTERS.replace("<", "")), min_size=0, max_size=12)


def test_a_prompt_ends_where_the_assistant_begins(characters):
    ids = characters.render([user("ab")])
    assert characters.tokenizer.decode(ids) == "<|user|>ab<|end|><|assistant|>"
    assert characters.render([user("ab")], add_generation_prompt=False) == ids[:-1]


@settings(max_examples=50)
@given(st.lists(texts, min_size=2, max_size=6))
def test_turn_by_turn_and_at_once_give_the_same_ids_where_turns_end_in_special_tokens(characters, contents):
    messages = [user(text) if index % 2 == 0 else assistant(text) for index, text in enumerate(contents)]
    if messages[-1]["role"] == "assistant":
        messages.pop()
    ids = characters.render(messages[:1])
    for said, asked in zip(messages[1::2], messages[2::2], strict=True):
        sampled = [*characters.encode(said["content"]), characters.tokenizer.eos_token_id]
        ids = characters.render_continuation([*ids, *sampled], [asked])
    assert ids == characters.render(messages)


@settings(max_examples=50)
@given(st.lists(st.integers(2, 390), max_size=12), st.sampled_from(["", "end", "end and line feed"]))
def test_a_continuation_keeps_every_given_id_and_closes_the_turn_once(chatml, sampled, closing):
    end, feed = chatml.tokenizer.eos_token_id, chatml.encode("\n")
    prompt = chatml.render([user("hello")])
    given_ids = [
        *prompt,
        *[t for t in sampled if t != feed[0]],
        *([end] if closing else []),
        *(feed if "feed" in closing else []),
    ]
    ids = chatml.render_continuation(given_ids, [user("and?")])
    assert ids[: len(given_ids)] == given_ids
    added = chatml.tokenizer.decode(ids[len(given_ids) :])
    after = "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert added == {"": "<|im_end|>\n", "end": "\n", "end and line feed": ""}[closing] + after


def test_a_mask_covers_the_answers_with_their_end_token_and_nothing_else(chatml):
    messages = [
        {"role": "system", "content": "be kind"},
        user("hello"),
        assistant("hello there"),
        user("again"),
        assistant("no"),
    ]
    rendered = chatml.render_sft(messages)
    decode = chatml.tokenizer.decode
    assert decode(rendered.ids) == chatml.text(messages, add_generation_prompt=False)
    learned = [token for token, learn in zip(rendered.ids, rendered.loss_mask, strict=True) if learn]
    assert decode(learned) == "hello there<|im_end|>no<|im_end|>"


def test_a_demonstration_begins_with_the_ids_of_its_prompt(chatml):
    rendered = chatml.render_sft([user("what is the answer?"), assistant("hello")])
    prompt = chatml.render([user("what is the answer?")])
    assert rendered.ids[: len(prompt)] == prompt
    assert rendered.loss_mask.index(True) == len(prompt)


def test_plain_text_is_joined_as_it_is_and_gets_an_end_token(characters):
    rendered = characters.render_completion("2+2=", "4")
    assert characters.tokenizer.decode(rendered.ids) == "2+2=4<|end|>"
    assert rendered.loss_mask == [False] * 4 + [True] * 2
    with pytest.raises(TemplateError, match="the prompt must not be empty"):
        characters.render_completion("", "4")


def test_a_template_that_rewrites_earlier_turns_is_named():
    renderer = ChatRenderer(word_piece(THINKING))
    assert renderer.render([user("hello")])
    with pytest.raises(TemplateError, match=r"changes the text before message 3.*give a template that only appends"):
        renderer.render_sft([user("a"), assistant("b"), user("c"), assistant("d")])


def test_a_demonstration_that_begins_otherwise_than_a_sampled_turn_is_named():
    opens = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    assert opens != CHATML
    renderer = ChatRenderer(word_piece(opens))
    with pytest.raises(TemplateError, match=r"begins a turn that is sampled with .*<think>.*reasoning_content"):
        renderer.render_turns([user("a"), assistant("b")])


def test_a_template_that_leaves_out_an_assistants_text_is_named():
    parts = CHATML.replace("message.content +", "(message.content if message.role == 'user' else '') +")
    assert parts != CHATML
    with pytest.raises(
        TemplateError, match=r"message 1 has the role 'assistant', whose text the chat template leaves out"
    ):
        ChatRenderer(word_piece(parts)).render_turns([user("a"), assistant("b")])


def test_a_demonstration_whose_tool_result_is_left_out_is_named():
    silent = CHATML.replace("{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}")
    assert silent != CHATML
    result = {"role": "tool", "content": "4 degrees", "tool_call_id": "1"}
    with pytest.raises(TemplateError, match="leaves out the tool's result in message 2"):
        ChatRenderer(word_piece(silent)).render_turns([user("a"), assistant("b"), result, assistant("c")])


def test_a_template_without_history_cannot_be_continued():
    with pytest.raises(TemplateError, match="whole conversation"):
        ChatRenderer(word_piece(HIDES_HISTORY)).render_continuation([1, 2], [user("x")])


def test_wrong_messages_are_refused_with_the_templates_own_reason(characters):
    with pytest.raises(TemplateError, match="unknown role wizard"):
        characters.render([{"role": "wizard", "content": "x"}])
    with pytest.raises(TemplateError, match="no turn to learn"):
        characters.render_sft([user("x")])
    with pytest.raises(TemplateError, match="no messages"):
        characters.render_continuation([1], [])
    plain = word_piece(CHATML)
    plain.chat_template = None
    with pytest.raises(TemplateError, match="no chat template"):
        ChatRenderer(plain).render([user("x")])


def test_the_digest_follows_what_turns_messages_into_ids_and_nothing_else(tmp_path: Path):
    tokenizer = word_piece(CHATML)
    digest = tokenizer_digest(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_digest(loaded) == digest
    loaded("hello", padding="max_length" if loaded.pad_token else False, truncation=True, max_length=4)
    assert tokenizer_digest(loaded) == digest
    loaded.chat_template = THINKING
    assert tokenizer_digest(loaded) != digest
    assert tokenizer_digest(character_tokenizer(TINY)) != digest


@pytest.mark.parametrize("content", [None, ["ab"], 5])
def test_an_answer_that_is_no_text_is_not_learned(characters, content):
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": content}]
    with pytest.raises(TemplateError, match=r"message 1 of the assistant has content of type (NoneType|list|int)"):
        characters.render_sft(messages)


def test_a_turn_of_tool_calls_alone_has_an_empty_text(characters):
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    empty = {**called, "content": ""}
    question = {"role": "user", "content": "ab"}
    assert characters.render_sft([question, called]) == characters.render_sft([question, empty])


@pytest.mark.parametrize("content", [None, 5])
def test_a_message_that_is_no_text_is_not_written_as_one(characters, content):
    with pytest.raises(TemplateError, match=r"message 0 of the user has content of type (NoneType|int)"):
        characters.render_sft([{"role": "user", "content": content}, assistant("x")])


def test_a_role_that_the_template_passes_over_is_refused_and_one_of_its_own_is_taken():
    lists = "{% for message in messages %}{% if message.role in ['user', 'assistant', 'critic'] %}"
    known = lists + CHATML.removeprefix("{% for message in messages %}").replace(
        "{% endfor %}", "{% endif %}{% endfor %}"
    )
    renderer = ChatRenderer(word_piece(known))
    with pytest.raises(
        TemplateError, match="message 0 has the role 'usr', whose text the chat template leaves out: use assist"
    ):
        renderer.render_sft([{"role": "usr", "content": "x"}, assistant("y")])
    rendered = renderer.render_sft([{"role": "critic", "content": "x"}, assistant("y")])
    assert "critic\nx" in renderer.tokenizer.decode(rendered.ids)


SWITCHES = (
    "{%- if not date is defined -%}{%- set date = '' -%}{%- endif -%}{{ bos_token }}"
    "{%- for message in messages -%}{% generation %}{{ message.content }}{% endgeneration %}{% continue %}{%- endfor -%}"
    "{{ date }}{%- if enable_thinking -%}<think>{%- endif -%}{{ tools }}{{ documents }}{{ strftime_now('%Y')[:0] }}"
)


def test_the_variables_that_a_caller_may_set_are_those_that_the_template_reads():
    assert template_variables(word_piece(SWITCHES)) == {"date", "enable_thinking"}
    several = word_piece(CHATML)
    several.chat_template = {"default": CHATML, "tool_use": SWITCHES}
    assert template_variables(several) == {"date", "enable_thinking"}
    several.chat_template = None
    assert template_variables(several) == frozenset()


def test_an_allowed_variable_reaches_the_template():
    assert ChatRenderer(word_piece(SWITCHES), {"enable_thinking": True}).text([user("x")]).startswith("x<think>")


@pytest.mark.parametrize(
    "name",
    [
        *["chat_template", "continue_final_message", "tokenize", "return_dict", "padding", "tokenizer_kwargs"],
        *["messages", "conversation", "tools", "documents", "add_generation_prompt", "raise_exception"],
        *["bos_token", "eos_token", "self", "enable_thinking ", "other"],
    ],
)
def test_an_argument_that_is_not_the_callers_is_refused_with_those_that_are(name):
    with pytest.raises(TemplateArgumentError, match="takes date, enable_thinking"):
        ChatRenderer(word_piece(SWITCHES), {name: "{{ 7 * 7 }}"})


@pytest.mark.parametrize(
    "body", ["messages[9].content", "1 // (messages|length - 1)", "'x'.nothing.more", "messages.foo()"]
)
def test_whatever_a_template_fails_with_is_a_refusal(body):
    with pytest.raises(TemplateError, match="refuses"):
        ChatRenderer(word_piece("{{ " + body + " }}")).render([user("x")])


def test_a_refusal_quotes_only_the_beginning_of_a_long_message():
    template = "{{ raise_exception(messages[0].content) }}"
    with pytest.raises(TemplateError) as caught:
        ChatRenderer(word_piece(template)).render([user("x" * 100_000)])
    assert len(str(caught.value)) < 1000
