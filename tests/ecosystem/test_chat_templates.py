"""Each chat template that TRL ships: a turn with a tool's result is appended as the template itself writes it, or refused.

The judge knows nothing of stand-ins: it renders the same conversation whole, with the real call, and compares what follows the call.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout_svc.replies import reply_format, written_call
from sluice.render import ChatRenderer, Rendered, TemplateError

TEMPLATES = Path(__file__).parents[2] / ".venv-bench/trl/chat_templates"

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.skipif(not TEMPLATES.is_dir(), reason="TRL is not installed in .venv-bench: run `make install-bench`"),
]

WIDE_BAR = "\N{FULLWIDTH VERTICAL LINE}"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Say what the weather is.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "forecast")
]
QUESTION = {"role": "user", "content": "How warm is it?"}
LAST_ARGUMENT = "Ushuaia"
"""Argument of the last call of the sampled turn, and of nothing else."""


def call(index: int, city: str, name: str = "weather") -> dict[str, Any]:
    function = {"name": name, "arguments": f'{{"city": "{city}"}}'}
    return {"id": f"call0000{index}", "type": "function", "function": function}


def turn(*calls: dict[str, Any], **fields: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **fields}


def result(index: int, content: str, name: str = "weather") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{index}", "name": name, "content": content}


ONE = turn(call(1, LAST_ARGUMENT))
CONVERSATIONS = {  # messages, and how many of them the ids stand for
    "one result": ([QUESTION, ONE, result(1, "4 degrees")], 2),
    "two results": (
        [
            QUESTION,
            turn(call(1, "Oslo"), call(2, LAST_ARGUMENT, "forecast")),
            result(1, "3"),
            result(2, "5", "forecast"),
        ],
        2,
    ),
    "text and call": ([QUESTION, {**ONE, "content": "Let me look."}, result(1, "4 degrees")], 2),
    "reasoning": ([QUESTION, {**ONE, "reasoning_content": "I must look."}, result(1, "4 degrees")], 2),
    "result and user": ([QUESTION, ONE, result(1, "4 degrees"), {"role": "user", "content": "And now?"}], 2),
    "second call": (
        [QUESTION, turn(call(1, "Oslo")), result(1, "3"), turn(call(2, LAST_ARGUMENT)), result(2, "4 degrees")],
        4,
    ),
}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer to which the markers of the template are special tokens."""
    markers = set(
        re.findall(
            rf"<[|{WIDE_BAR}][^<>{{}}'\"\s]+[|{WIDE_BAR}]>|<\|[a-z_]+>|<[a-z_]+\|>|</?(?:s|start_of_turn|end_of_turn|eos|bos)>",
            template,
        )
    )
    backend = Tokenizer(
        models.BPE({byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(sorted({*markers, "<|bos|>", "<|eos|>"}))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        extra_special_tokens=sorted(markers),
        chat_template=template,
    )


def writes_results(renderer: ChatRenderer) -> bool:
    """Whether the template writes the result of a tool."""
    try:
        return "4 degrees" in renderer.text(CONVERSATIONS["one result"][0], tools=TOOLS)
    except TemplateError:
        return False


def outcome(renderer: ChatRenderer, messages: list[dict[str, Any]], known: int) -> str:
    """Append what follows the sampled turn, and judge it by the whole conversation: right, refused or wrong; or not rendered."""
    text = partial(renderer.text, tools=TOOLS)
    try:
        prompt, alone = text(messages[: known - 1]), text(messages[:known], add_generation_prompt=False)
        whole = text(messages)
    except TemplateError:
        return "not rendered"
    marks = [str(mark) for mark in renderer.tokenizer.all_special_tokens]
    call_at = max(alone.rfind(LAST_ARGUMENT), 0)
    ended = max((found.end() for mark in marks for found in re.finditer(re.escape(mark), alone[call_at:])), default=0)
    end = call_at + ended if ended else len(alone)  # of what the model samples: up to its last special token
    start = len(prompt) if alone.startswith(prompt) else call_at or alone.rfind("<", 0, end)
    ids = renderer.encode(prompt + alone[start:end])
    try:
        continued = renderer.render_continuation(ids, messages[known:], earlier=messages[:known], tools=TOOLS)
    except TemplateError:
        return "refused"
    if whole.startswith(prompt + alone[start:end]):
        return "right" if continued == renderer.encode(whole) else "wrong"
    # The template writes the turn differently when a result follows it; what comes after the call is the same.
    found = renderer.tokenizer.decode(continued[len(ids) :])
    if call_at:
        wanted = whole[whole.rfind(LAST_ARGUMENT) :]
        return "right" if continued[: len(ids)] == ids and alone[call_at:end] + found == wanted else "wrong"
    return "right" if continued[: len(ids)] == ids and alone[:end] + found == whole else "wrong"


def test_what_follows_a_tool_call_is_appended_as_the_template_writes_it_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table: dict[str, dict[str, str]] = {}
    for path in sorted(TEMPLATES.glob("*.jinja")):
        renderer = ChatRenderer(tokenizer_of(path.read_text()))
        if writes_results(renderer):
            table[path.stem] = {name: outcome(renderer, *each) for name, each in CONVERSATIONS.items()}
    with capsys.disabled():
        print("\n" + "template".ljust(38) + "".join(name.ljust(18) for name in CONVERSATIONS))
        for stem, row in table.items():
            print(stem.ljust(38) + "".join(each.ljust(18) for each in row.values()))
        for name in CONVERSATIONS:
            print(name.ljust(18), dict(Counter(row[name] for row in table.values())))
    assert len(table) == 54
    assert [(stem, name) for stem, row in table.items() for name, each in row.items() if each == "wrong"] == []


def test_templates_that_write_calls_as_json_have_a_parser_in_both_engines():
    templates = {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")}
    found = {
        stem
        for stem, text in templates.items()
        if reply_format(tokenizer_of(text), "auto", "none").tool_parser == "json"
    }
    written = {stem for stem, text in templates.items() if "<tool_call>\n{" in (written_call(tokenizer_of(text)) or "")}
    assert found == written
    assert {"qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"} <= found


COLD, MORE = {"role": "assistant", "content": "It is cold."}, {"role": "user", "content": "And now?"}
DEMONSTRATIONS = {
    "one result": [QUESTION, ONE, result(1, "4 degrees"), COLD],
    "two results": [*CONVERSATIONS["two results"][0], COLD],
    "reasoning": [
        QUESTION,
        {**ONE, "reasoning_content": "I must look."},
        result(1, "4 degrees"),
        {**COLD, "reasoning_content": "So."},
    ],
    "turns": [QUESTION, COLD, MORE, COLD],
    "late call": [QUESTION, COLD, MORE, ONE, result(1, "4 degrees"), COLD],
}


def learned_turns(row: Rendered) -> Iterator[tuple[list[int], list[int]]]:
    """Yield what comes before each stretch that is learned, and the stretch."""
    for is_learned, places in itertools.groupby(range(len(row.ids)), lambda place: row.loss_mask[place]):
        if is_learned:
            first, *others = places
            yield row.ids[:first], row.ids[first : first + 1 + len(others)]


def sampled_prompt(renderer: ChatRenderer, ids: list[int], messages: list[dict[str, Any]], known: int) -> list[int]:
    """Return what a model continues: the ids so far with what follows them, or another rendering where these do not stand for it."""
    with contextlib.suppress(TemplateError):
        continued = renderer.render_continuation(ids, messages[known:], earlier=messages[:known], tools=TOOLS)
        if renderer.stands_for(continued, messages, tools=TOOLS):
            return continued
    return renderer.render(messages, tools=TOOLS)


def test_what_is_learned_of_a_demonstration_is_what_would_be_sampled_of_it() -> None:
    judged, different = Counter[str](), []
    for path in sorted(TEMPLATES.glob("*.jinja")):
        renderer = ChatRenderer(tokenizer_of(path.read_text()))
        for name, messages in DEMONSTRATIONS.items():
            try:
                rows = renderer.render_turns(messages, TOOLS)
            except TemplateError:
                continue
            judged[name] += 1
            asked = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
            known, ids = 0, list[int]()
            for place, (context, turn_ids) in zip(
                asked, itertools.chain.from_iterable(map(learned_turns, rows)), strict=True
            ):
                prompt = (
                    sampled_prompt(renderer, ids, messages[:place], known)
                    if known
                    else renderer.render(messages[:place], tools=TOOLS)
                )
                if prompt != context:
                    different.append((path.stem, name, place))
                known, ids = place + 1, [*prompt, *turn_ids]
    assert different == []
    assert min(judged[name] for name in DEMONSTRATIONS) >= 40


QUOTED = {
    "user": [{"role": "user", "content": "a {} b"}],
    "system": [{"role": "system", "content": "a {} b"}, QUESTION],
    "assistant": [QUESTION, {"role": "assistant", "content": "<think>\nwhy {}\n</think>\n\na {}\n"}, QUESTION],
    "reasoning": [QUESTION, {"role": "assistant", "content": "a", "reasoning_content": "why {}"}, QUESTION],
    "call": [QUESTION, turn(call(1, "{}")), result(1, "4 degrees")],
    "result": [QUESTION, ONE, result(1, "<tool_response> {}")],
}


CHANNEL = {("assistant", "<|channel>"), ("assistant", "<channel|>")}
DECIDES = {"gemma4": CHANNEL, "diffusion": CHANNEL}
"""Where a template takes reasoning out of an assistant's text by its control tokens."""


def quoting(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    return json.loads(json.dumps(messages).replace("{}", text))


@pytest.mark.parametrize("stem", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_control_tokens_in_a_text_are_text_and_other_text_keeps_its_ids(stem: str) -> None:
    renderer = ChatRenderer(tokenizer_of((TEMPLATES / f"{stem}.jinja").read_text()))
    marks = renderer.tokenizer.all_special_tokens
    ids = set(renderer.tokenizer.convert_tokens_to_ids(marks))
    judged, refused = 0, set()
    for name, messages in QUOTED.items():
        try:
            harmless = renderer.render(quoting(messages, "< x |"))
        except TemplateError:  # of a system message, or of a result without a tool
            continue
        assert harmless == renderer.encode(renderer.text(quoting(messages, "< x |")))
        for mark in marks:
            judged += 1
            try:
                quoted = renderer.render(quoting(messages, mark))
            except TemplateError:
                refused.add((name, mark))
                continue
            assert renderer.tokenizer.decode(quoted) == renderer.text(quoting(messages, mark))
            assert [id_ for id_ in quoted if id_ in ids] == [id_ for id_ in harmless if id_ in ids]
    assert judged
    assert refused <= DECIDES.get(stem.partition("_")[0], set())


WRITE_NO_END = {
    "glm4moe",
    *(f"{stem}{kind}" for stem in ("idefics3", "llava_next", "smolvlm") for kind in ("", "_training")),
}
"""Templates that end no turn, or leave a text out that is not a list of parts."""


THINKS_FIRST = {"deepseekv3", "deepseek_r1_distill", "nemotron_3"}
"""Templates that begin a turn with reasoning when it is sampled, and write a turn without reasoning in another way."""


@pytest.mark.parametrize("stem", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_the_end_of_a_turn_is_found_and_learned(stem: str) -> None:
    renderer = ChatRenderer(tokenizer_of((TEMPLATES / f"{stem}.jinja").read_text()))
    end = next((id_ for id_, places in renderer.ends.sources.items() if "chat template" in places), None)
    assert (end is None) == (stem in WRITE_NO_END)
    if end is None:
        return
    try:
        rows = renderer.render_turns([QUESTION, {"role": "assistant", "content": "4 degrees"}])
    except TemplateError:
        assert any(stem.startswith(each) for each in THINKS_FIRST)
        return
    learned = [id_ for row in rows for id_, learn in zip(row.ids, row.loss_mask, strict=True) if learn]
    assert (learned[-1], learned.count(end)) == (end, 1)
    assert "4 degrees" in renderer.tokenizer.decode(learned)
