"""What a model's reply says: its reasoning, its tool calls and the rest as content.

Two formats are read here: `<think>...</think>`, and `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which Qwen's and many
other templates write. For other formats there are vLLM's parsers, where vLLM is the engine.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import structlog
from prometheus_client import Counter

from sluice.config import ConfigError
from sluice.render import ChatRenderer, TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = structlog.get_logger()

CALLS = Counter(
    "sluice_rollout_tool_calls", "Tool calls in replies: parsed, or malformed and left in the content.", ("outcome",)
)

CALL_START, CALL_END, THINK_START, THINK_END = "<tool_call>", "</tool_call>", "<think>", "</think>"
MARKERS = frozenset({CALL_START, CALL_END, THINK_START, THINK_END})

MAX_CALLS = 256
"""Maximum number of calls in one reply, malformed ones included; further ones stay in the content."""

MAX_BEFORE_REPLY = 16
"""Number of tokens before a reply that may open its reasoning."""

PROBE_QUESTION = "SLUICEquestionSENTINEL"
PROBE_NAME, PROBE_ARGUMENTS = "look", {"where": "there"}
PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": PROBE_NAME,
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
        },
    }
]
"""A call that a template is asked to write, to see which parser reads it back."""


LEAST_MARK = 4
"""Minimum length of a word that a template writes before the name of a tool for it to show that a call begins."""

_TAG = re.compile(r"<[^\s<>\"{}]{2,}>?|\[[A-Z_]{3,}\]")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the model wrote it.

    Attributes:
        name: Name of the tool.
        arguments: Text of the arguments.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    """Content and calls of a reply.

    Attributes:
        content: The text outside of the calls.
        calls: The calls in order.
        malformed: Number of calls that could not be read and are still in the content.
    """

    content: str
    calls: Sequence[Call] = ()
    malformed: int = 0


ReadCalls: TypeAlias = Callable[[str, Sequence[Mapping[str, Any]]], Said]
"""Reads the calls in a text, given the tools that were offered."""

ReadReasoning: TypeAlias = Callable[[str, bool], tuple[str, str]]
"""Splits a text into reasoning and the rest, given whether the prompt has opened the reasoning."""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the replies of one model are read.

    Attributes:
        tool_parser: Name of the parser of tool calls, or "none".
        reasoning_parser: Name of the parser of reasoning, or "none".
        read_calls: That parser.
        read_reasoning: That parser.
        kept: Special tokens that stay in the text that is parsed. None: all.
    """

    tool_parser: str = "none"
    reasoning_parser: str = "none"
    read_calls: ReadCalls | None = None
    read_reasoning: ReadReasoning | None = None
    kept: frozenset[str] | None = field(default=MARKERS)


def reply_format(
    tokenizer: PreTrainedTokenizerBase | None,
    tool_parser: str,
    reasoning_parser: str,
    *,
    parsers: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> ReplyFormat:
    """Return how the replies of a model are read.

    With "auto" the template writes a call, and the first parser that reads it back is taken; reasoning is read if the template
    mentions `<think>`.

    Args:
        tokenizer: The model's tokenizer, with its template.
        tool_parser: "auto", "none", "json" or the name of another parser.
        reasoning_parser: "auto", "none", "think" or the name of another parser.
        parsers: Module with the parsers of the engine's library, beside the two of this one.
        arguments: Arguments of the chat template.

    Raises:
        ConfigError: for a name that is not known.
    """
    if tokenizer is None:
        return ReplyFormat()
    others = importlib.import_module(parsers) if parsers is not None else None
    written = written_call(tokenizer, arguments) if tool_parser == "auto" else None
    if tool_parser == "auto":
        tool_parser = "none"
        if written is not None and reads_back(read_json_calls, written):
            tool_parser = "json"
        elif written is not None and others is not None:
            tool_parser = others.find_tool_parser(tokenizer, functools.partial(reads_back, written=written))
    if reasoning_parser == "auto":
        reasoning_parser = "think" if _mentions_thinking(tokenizer) else "none"
    ours: dict[str, Any] = {"none": None, "json": read_json_calls, "think": split_thinking}
    for setting, name, known in (
        ("tool_parser", tool_parser, ("json", "none")),
        ("reasoning_parser", reasoning_parser, ("think", "none")),
    ):
        if name not in known and others is None:
            raise ConfigError(
                f"rollout.{setting} is {name!r}: only vLLM has further parsers; use auto, {' or '.join(known)}, or engine = vllm"
            )
    read_calls: ReadCalls | None = (
        ours[tool_parser]
        if tool_parser in {"json", "none"} or others is None
        else others.tool_reader(tokenizer, tool_parser)
    )
    read_reasoning: ReadReasoning | None = (
        ours[reasoning_parser]
        if reasoning_parser in {"think", "none"} or others is None
        else others.reasoning_reader(tokenizer, reasoning_parser)
    )
    if written is not None and tool_parser == "none":
        log.warning(
            "no parser reads the tool calls of this model's template, so that they stay in the content; set rollout.tool_parser",
            call=written[:200],
        )
    own = tool_parser in {"json", "none"} and reasoning_parser in {"think", "none"}
    log.info("replies are parsed", tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    return ReplyFormat(tool_parser, reasoning_parser, read_calls, read_reasoning, MARKERS if own else None)


def written_call(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None) -> str | None:
    """Return a turn with a call as the model's template writes it, and None if it writes none."""
    call = {"id": "call00001", "type": "function", "function": {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS}}
    written = _written_turn(tokenizer, {"role": "assistant", "content": "", "tool_calls": [call]}, arguments)
    return written if PROBE_NAME in written else None


def call_marks(tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
    """Return what the model's template writes before the name of a tool, at most once for each call, and not in other turns.

    Tags, such as `<tool_call>` and `[TOOL_CALLS]`; without any, the last word that is not too short to mean something.
    """
    opening = (written_call(tokenizer) or "").partition(PROBE_NAME)[0]
    other = _written_turn(tokenizer, {"role": "assistant", "content": "Done."})
    marks = _TAG.findall(opening) or [word for word in opening.split() if len(word) >= LEAST_MARK][-1:]
    return [mark for mark in dict.fromkeys(marks) if mark not in other]


def _written_turn(
    tokenizer: PreTrainedTokenizerBase, turn: dict[str, Any], arguments: Mapping[str, Any] | None = None
) -> str:
    """Return a turn of the assistant as the model's template writes it; an empty text if it refuses."""
    question = {"role": "user", "content": PROBE_QUESTION}
    try:
        renderer = ChatRenderer(tokenizer, arguments)
        prompt = renderer.text([question], tools=PROBE_TOOLS)
        text = renderer.text([question, turn], add_generation_prompt=False, tools=PROBE_TOOLS)
    except TemplateError:
        return ""
    return text[len(prompt) :] if text.startswith(prompt) else text.rpartition(PROBE_QUESTION)[2]


def reads_back(read: ReadCalls, written: str) -> bool:
    """Return whether a parser reads the call that the template has written."""
    said = read(written, PROBE_TOOLS)
    return [call.name for call in said.calls] == [PROBE_NAME] and _parsed(said.calls[0].arguments) == PROBE_ARGUMENTS


def split_thinking(text: str, opened: bool) -> tuple[str, str]:
    """Return the reasoning at the beginning of a text and what follows it. Reasoning without an end is all of the text."""
    if not opened:
        before, mark, rest = text.partition(THINK_START)
        if not mark or before.strip():
            return "", text
        text = rest
    reasoning, mark, rest = text.partition(THINK_END)
    return reasoning.strip("\n"), rest.lstrip("\n") if mark else ""


def read_json_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> Said:
    """Return the calls between `<tool_call>` and `</tool_call>`, and the text outside of them.

    The last call may lack its end, as when a stop string ended the reply. What is not a call stays in the content.
    """
    del tools
    calls: list[Call] = []
    outside: list[str] = []
    done, malformed = 0, 0
    start = text.find(CALL_START)
    while start >= 0:
        if len(calls) + malformed == MAX_CALLS:
            malformed += text.count(CALL_START, start)
            break
        inner = start + len(CALL_START)
        ends = text.find(CALL_END, inner)
        call = _json_call(text[inner : len(text) if ends < 0 else ends])
        after = len(text) if ends < 0 else ends + len(CALL_END)
        if call is None:
            malformed += 1
            after = inner  # a further start may be inside
        else:
            calls.append(call)
            outside.append(text[done:start])
            done = after
        start = text.find(CALL_START, after)
    outside.append(text[done:])
    if not calls:
        return Said(text, malformed=malformed)
    return Said("\n".join(part.strip() for part in outside if part.strip()), calls, malformed)


def _json_call(text: str) -> Call | None:
    """Return a call from its JSON object, with the text of its arguments; None if it is not one."""
    try:
        members = _members(text)
        name = _parsed(members.get("name", "null"))
    except (ValueError, RecursionError):
        return None
    arguments = members.get("arguments", members.get("parameters", "{}"))
    if arguments.startswith('"'):  # some models write the object as a string
        arguments = _parsed(arguments)
    if not isinstance(name, str) or not name or not isinstance(_parsed(arguments), dict):
        return None
    return Call(name, arguments)


def _members(text: str) -> dict[str, str]:
    """Return the text of each value of a JSON object.

    Raises:
        ValueError: if it is not one.
    """
    decoder = json.JSONDecoder()
    text = text.strip()
    decoder.decode(text)
    if not text.startswith("{"):
        raise ValueError("not an object")
    members: dict[str, str] = {}
    at = _after_space(text, 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        start = _after_space(text, _after_space(text, at) + 1)  # past the colon
        _, at = decoder.raw_decode(text, start)
        members[key] = text[start:at]
        at = _after_space(text, at)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return members


def _after_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _parsed(text: str) -> Any:  # noqa: ANN401 - JSON
    """Return the value of a JSON text; None if it is malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _mentions_thinking(tokenizer: PreTrainedTokenizerBase) -> bool:
    template = tokenizer.chat_template or ""
    text = template if isinstance(template, str) else json.dumps(template)
    return THINK_START in text or THINK_END in text
