"""What follows a sampled turn is appended as the template itself writes it after that turn, or the continuation is refused."""

from __future__ import annotations

from typing import Any

import pytest
from test_render import CHATML, word_piece

from sluice.render import ChatRenderer, TemplateError

CALLS = (  # ChatML with calls in JSON, as many templates write them
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments}|tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADER_BY_CALL = CALLS.replace(  # writes another header before a result that follows no call
    "'<|im_start|>' + message.role",
    "('<|im_start|>result' if message.role == 'tool' and messages[loop.index0 - 1].tool_calls else '<|im_start|>' + message.role)",
)
RESULT_INSIDE_THE_TURN = (  # writes a result beside its call, and nothing where there is no call
    "{% for message in messages %}{% if message.role != 'tool' %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function.arguments|tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% if message.tool_calls %}{% for other in messages[loop.index:] if other.role == 'tool' %}"
    "{{ '<result>' + other.content + '</result>' }}{% endfor %}{% endif %}"
    "{% endif %}{% endfor %}"
)
NEEDS_A_CALL = CALLS.replace(
    "{{ '<|im_start|>' +",
    "{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "{{ '<|im_start|>' +",
)
NAMES_THE_TOOL = CALLS.replace("message.role + '\n'", "message.role + ' ' + (message.name or '') + '\n'").replace(
    "{% for message in messages %}",
    "{% set seen = namespace(name='') %}{% for message in messages %}"
    "{% if message.tool_calls %}{% set seen.name = message.tool_calls[-1].function.name %}{% endif %}"
    "{% if message.role == 'tool' %}{{ '<of>' + seen.name + '</of>' }}{% endif %}",
)
FORGETS_RESULTS = CALLS.replace("(message.content or '')", "(message.content if message.role != 'tool' else 'done')")

QUESTION = {"role": "user", "content": "what is the answer?"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"where": "there"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "hello"}


def sampled(renderer: ChatRenderer, turn: dict[str, Any]) -> list[int]:
    """Ids of the question and a turn, up to its last special token."""
    text = renderer.text([QUESTION, turn], add_generation_prompt=False)
    return renderer.encode(text.removesuffix("\n"))


@pytest.mark.parametrize("template", [CALLS, HEADER_BY_CALL, RESULT_INSIDE_THE_TURN, NEEDS_A_CALL, NAMES_THE_TOOL])
def test_a_result_is_appended_as_the_template_writes_it_after_its_call(template):
    renderer = ChatRenderer(word_piece(template))
    ids = sampled(renderer, CALL)
    continued = renderer.render_continuation(ids, [RESULT], earlier=[QUESTION, CALL])
    assert continued == renderer.render([QUESTION, CALL, RESULT])
    assert continued[: len(ids)] == ids


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (RESULT_INSIDE_THE_TURN, "leaves out a tool's result"),  # no call: the result vanishes
        (FORGETS_RESULTS, "leaves out a tool's result"),
    ],
)
def test_a_result_that_the_template_leaves_out_is_not_appended(template, reason):
    renderer = ChatRenderer(word_piece(template))
    answer = {"role": "assistant", "content": "hello"}
    with pytest.raises(TemplateError, match=reason):
        renderer.render_continuation(sampled(renderer, answer), [RESULT], earlier=[QUESTION, answer])


def test_a_conversation_whose_result_the_template_leaves_out_is_refused_and_one_in_another_form_is_not():
    renderer = ChatRenderer(word_piece(RESULT_INSIDE_THE_TURN))
    with pytest.raises(TemplateError, match="leaves out the tool's result in message 2"):
        renderer.render([QUESTION, {"role": "assistant", "content": "hello"}, RESULT])
    assert renderer.render([QUESTION, CALL, RESULT])
    escaped = CALLS.replace("(message.content or '')", "(message.content or '')|tojson")
    quoted = {**RESULT, "content": 'he said "hello"'}
    assert ChatRenderer(word_piece(escaped)).render([QUESTION, CALL, quoted])


def test_a_result_without_a_call_is_refused_with_the_templates_reason():
    renderer = ChatRenderer(word_piece(NEEDS_A_CALL))
    answer = {"role": "assistant", "content": "hello"}
    with pytest.raises(TemplateError, match="no call"):
        renderer.render_continuation(sampled(renderer, answer), [RESULT], earlier=[QUESTION, answer])


def test_a_call_that_is_not_known_is_guessed_from_its_result_and_a_name_that_matters_is_asked_for():
    renderer = ChatRenderer(word_piece(NEEDS_A_CALL))
    ids = sampled(renderer, CALL)
    assert renderer.render_continuation(ids, [RESULT]) == renderer.render([QUESTION, CALL, RESULT])
    naming = ChatRenderer(word_piece(NAMES_THE_TOOL))
    with pytest.raises(TemplateError, match="with the name of the tool"):
        naming.render_continuation(sampled(naming, CALL), [RESULT])
    named = {**RESULT, "name": "look"}
    assert naming.render_continuation(sampled(naming, CALL), [named]) == naming.render([QUESTION, CALL, named])


def test_what_depends_on_an_earlier_message_is_appended_as_the_whole_conversation_has_it():
    template = CHATML.replace(
        "{{ '<|im_start|>assistant\n' }}",
        "{{ '<|im_start|>assistant\n' + ('<think>' if messages[0].content == 'think' else '') }}",
    )
    renderer = ChatRenderer(word_piece(template))
    thinking = [{"role": "system", "content": "think"}, QUESTION, {"role": "assistant", "content": "hello"}]
    ids = renderer.encode(renderer.text(thinking, add_generation_prompt=False))
    assert renderer.render_continuation(ids, [QUESTION], earlier=thinking) == renderer.render([*thinking, QUESTION])


@pytest.mark.parametrize("cut", ["<tool_call>{", "<|im_end|>", "<|im_end|>\n"])
def test_a_turn_with_a_call_is_closed_once_wherever_it_was_cut(cut):
    renderer = ChatRenderer(word_piece(CALLS))
    whole = renderer.text([QUESTION, CALL], add_generation_prompt=False)
    ids = renderer.encode(whole[: whole.rindex(cut) + len(cut)])
    continued = renderer.render_continuation(ids, [RESULT], earlier=[QUESTION, CALL])
    added = renderer.tokenizer.decode(continued[len(ids) :])
    closed = {"<tool_call>{": "<|im_end|>\n", "<|im_end|>": "\n", "<|im_end|>\n": ""}[cut]
    assert added == closed + "<|im_start|>tool\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_arguments_have_the_form_that_the_template_reads():
    turn = [QUESTION, CALL]
    objects = ChatRenderer(word_piece(CALLS)).text(turn, add_generation_prompt=False)
    assert '"arguments": {"where": "there"}' in objects
    joined = CALLS.replace(
        "{'name': call.function.name, 'arguments': call.function.arguments}|tojson", "call.function.arguments"
    )
    assert '<tool_call>{"where": "there"}</tool_call>' in ChatRenderer(word_piece(joined)).text(
        turn, add_generation_prompt=False
    )
    malformed = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "function": {"name": "look", "arguments": "{where"}}]}
    text = ChatRenderer(word_piece(CALLS)).text([QUESTION, malformed], add_generation_prompt=False)
    assert '"arguments": "{where"' in text


def test_ids_stand_for_a_conversation_if_their_text_is_the_same_however_it_was_tokenized():
    renderer = ChatRenderer(word_piece(CHATML))
    messages = [QUESTION, {"role": "assistant", "content": "hello there"}, QUESTION]
    prompt, letters = renderer.render(messages[:1]), [renderer.encode(letter)[0] for letter in "hello there"]
    ids = renderer.render_continuation([*prompt, *letters], messages[2:], earlier=messages[:2])
    assert ids != renderer.render(messages)
    assert renderer.stands_for(ids, messages)
    assert not renderer.stands_for(ids, [QUESTION, {"role": "assistant", "content": "hello"}, QUESTION])
