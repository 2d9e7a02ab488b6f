"""Parses a model's reply into reasoning, tool calls, and the rest as content.

Two formats are read here: `<think>...</think>`, and `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which Qwen's and many
other templates write. If vLLM is the engine, its parsers read other formats.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import structlog
from prometheus_client import Counter

from sluice.config import ConfigError
from sluice.openai.answers import overlap
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
"""Maximum number of calls in one reply, including malformed ones. Further calls stay in the content."""

MAX_BEFORE_REPLY = 16
"""Number of last tokens of the prompt in which the reasoning may have been opened."""

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
"""A call to have a template write, in order to see which parser reads it back."""


LEAST_MARK = 4
"""Minimum length of a word before the name of a tool, in the text of a template, to count as the mark of a call."""

_OBJECT = re.compile(r"\s*\{")
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

OfferedTools: TypeAlias = Callable[[], Sequence[Mapping[str, Any]]]

ReadReasoning: TypeAlias = Callable[[str, bool], tuple[str, str]]
"""Splits a text into reasoning and the rest, given whether the prompt has opened the reasoning."""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the replies of one model are read.

    Attributes:
        tool_parser: Name of the parser of tool calls, or "none".
        reasoning_parser: Name of the parser of reasoning, or "none".
        read_calls: The parser of tool calls.
        read_reasoning: The parser of reasoning.
        kept: Special tokens that stay in the text to parse. None: all.
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

    With "auto", have the template write a call, and use the first parser that reads it back. Read reasoning if the template
    mentions `<think>`.

    Args:
        tokenizer: The model's tokenizer, with its template.
        tool_parser: "auto", "none", "json" or the name of another parser.
        reasoning_parser: "auto", "none", "think" or the name of another parser.
        parsers: Module with the parsers of the engine's library, in addition to the two of this module.
        arguments: Arguments of the chat template.

    Raises:
        ConfigError: for an unknown name.
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
    """Return a turn with a call as the model's template writes it; None if it writes no call."""
    call = {"id": "call00001", "type": "function", "function": {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS}}
    written = _written_turn(tokenizer, {"role": "assistant", "content": "", "tool_calls": [call]}, arguments)
    return written if PROBE_NAME in written else None


def call_marks(tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
    """Return the marks that the model's template writes before the name of a tool, and not in turns without calls.

    The marks are tags, such as `<tool_call>` and `[TOOL_CALLS]`; without tags, the last word of at least `LEAST_MARK` characters.
    """
    opening = (written_call(tokenizer) or "").partition(PROBE_NAME)[0]
    other = _written_turn(tokenizer, {"role": "assistant", "content": "Done."})
    marks = _TAG.findall(opening) or [word for word in opening.split() if len(word) >= LEAST_MARK][-1:]
    return [mark for mark in dict.fromkeys(marks) if mark not in other]


def _written_turn(
    tokenizer: PreTrainedTokenizerBase, turn: dict[str, Any], arguments: Mapping[str, Any] | None = None
) -> str:
    """Return a turn of the assistant as the model's template writes it; empty if the template refuses it."""
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
    """Return the reasoning at the beginning of a text and what follows it. If the reasoning has no end mark, the whole text is reasoning."""
    return _Thinking(opened).after(text, last=True)


def read_json_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> Said:
    """Return the calls between `<tool_call>` and `</tool_call>`, and the text outside of them.

    The last call may lack its end, for example if a stop string ended the reply. Text that is not a call stays in the content. If there
    are calls, white space around the calls and at the end is removed, and a line feed separates the texts before and after a call.
    """
    del tools
    reader = _JsonCalls()
    content = reader.after(text, last=True)
    return Said(content, reader.calls or (), reader.malformed)


class ReplyReader:
    """Reads one reply whose text comes in parts, and returns reasoning and content as soon as no later text can change them.

    The time for a part grows with the part's length only: of the earlier text, only an end that may begin a mark is searched again. The text
    after a malformed call is searched for further calls; that happens at most `MAX_CALLS` times in a reply.

    A parser of the engine's library gives its result only at the end.

    Args:
        how: How the model's replies are read.
        tools: Returns the tools that were offered, for a parser of the engine's library. None: no tools were offered, so no calls are read.
        opened: Whether the prompt has opened the reasoning.
    """

    def __init__(self, how: ReplyFormat, tools: OfferedTools | None, *, opened: bool) -> None:
        self._tools, self._opened = tools, opened
        self._thinking = _Thinking(opened) if how.read_reasoning is split_thinking else None
        self._calls = _JsonCalls() if tools is not None and how.read_calls is read_json_calls else None
        self._read_reasoning = None if self._thinking is not None else how.read_reasoning
        self._read_calls = None if self._calls is not None or tools is None else how.read_calls
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._unread: list[str] = []

    @property
    def needs_parser(self) -> bool:
        """Return whether a parser of the engine's library has to read the reply at its end, which may take long."""
        return self._read_reasoning is not None or self._read_calls is not None

    def after(self, new: str, *, last: bool) -> tuple[str, str]:
        """Return the reasoning and the content that are certain after more text, without what was returned before."""
        reasoning = ""
        if self._thinking is not None:
            reasoning, new = self._thinking.after(new, last=last)
        if self.needs_parser:
            self._unread.append(new)
            new = ""
        elif self._calls is not None:
            new = self._calls.after(new, last=last)
        self._reasoning.append(reasoning)
        self._content.append(new)
        return reasoning, new

    def read(self) -> tuple[str, Said]:
        """Return the reasoning of the whole reply, and its content and calls. Call it after the last part.

        Raises:
            Exception: any error of a parser of the engine's library.
        """
        reasoning, rest = self.unread()
        if self._calls is not None:
            return reasoning, Said("".join(self._content), self._calls.calls or (), self._calls.malformed)
        if not self.needs_parser:
            return reasoning, Said("".join(self._content))
        if self._read_reasoning is not None:
            reasoning, rest = self._read_reasoning(rest, self._opened)
        if self._read_calls is None or self._tools is None:
            return reasoning, Said(rest)
        return reasoning, self._read_calls(rest, self._tools())

    def unread(self) -> tuple[str, str]:
        """Return the reasoning that is certain, and the text that a parser of the engine's library would have to read."""
        return "".join(self._reasoning), "".join(self._unread)


class _Thinking:
    """Splits a text that comes in parts as `split_thinking` does.

    Args:
        opened: Whether the prompt has opened the reasoning.
    """

    def __init__(self, opened: bool) -> None:
        self._place: Literal["before", "within", "after"] = "within" if opened else "before"
        self._mark = ""
        """The end of the text, which may begin a mark."""
        self._space: list[str] = []
        """White space before the reasoning."""
        self._feeds = 0
        """Number of line feeds at the end of the reasoning so far. They are left out unless more reasoning follows."""
        self._is_begun = False
        self._strips_answer = False

    def after(self, new: str, *, last: bool) -> tuple[str, str]:
        """Return the reasoning and the rest that are certain after more text."""
        reasoning = ""
        if self._place == "before":
            text = self._mark + new
            start = text.lstrip()
            self._space.append(text[: len(text) - len(start)])
            if THINK_START.startswith(start) and start != THINK_START and not last:
                self._mark = start
                return "", ""
            if not start.startswith(THINK_START):
                self._place = "after"
                return "", "".join(self._space) + start
            self._place, self._mark, new = "within", "", start.removeprefix(THINK_START)
        if self._place == "within":
            thought, end, rest = (self._mark + new).partition(THINK_END)
            begun = 0 if end or last else overlap(thought, THINK_END)
            self._mark = thought[len(thought) - begun :]
            reasoning = self._reasoned(thought[: len(thought) - begun])
            if not end:
                return reasoning, ""
            self._place, self._strips_answer, new = "after", True, rest
        if self._strips_answer:
            new = new.lstrip("\n")
            self._strips_answer = not new
        return reasoning, new

    def _reasoned(self, text: str) -> str:
        """Return more of the reasoning. Leave out line feeds at the beginning and the end of the whole reasoning."""
        if not self._is_begun:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        feeds = len(text) - len(body)
        if not body:
            self._feeds += feeds
            return ""
        reasoning = "\n" * self._feeds + body
        self._feeds, self._is_begun = feeds, True
        return reasoning


class _JsonCalls:
    """Reads the calls in a text that comes in parts as `read_json_calls` does.

    Attributes:
        calls: The calls so far.
        malformed: Number of calls so far that could not be read.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.malformed = 0
        self._mark = ""
        """The end of the text so far, which may be the beginning of a start mark, or in an open call the beginning of its end mark."""
        self._open: list[str] | None = None
        """The text of a call that has begun; None outside of calls."""
        self._space: list[str] = []
        """White space at the end of the content so far. It is left out unless more content follows."""
        self._has_content = self._follows_call = False

    def after(self, new: str, *, last: bool) -> str:
        """Return the content that is certain after more text."""
        text = self._mark + new
        if self._open is not None:
            self._open.append(new)
            if CALL_END not in text and not last:
                self._mark = text[1 - len(CALL_END) :]
                return ""
            text = CALL_START + "".join(self._open)
            self._open = None
        content: list[str] = []
        at, end = 0, -1
        while (start := text.find(CALL_START, at)) >= 0:
            if len(self.calls) + self.malformed >= MAX_CALLS:
                self.malformed += text.count(CALL_START, start)
                start = text.rfind(CALL_START) + len(CALL_START)
                content += self._outside(text[at:start])
                at = start
                break
            content += self._outside(text[at:start])
            at = start + len(CALL_START)
            if end < at:
                end = text.find(CALL_END, at)
                end = len(text) if end < 0 else end
            if end == len(text) and not last:
                self._open = [text[at:]]
                self._mark = self._open[0][1 - len(CALL_END) :]
                return "".join(content)
            call = _json_call(text[at:end]) if _OBJECT.match(text, at, end) else None
            if call is None:
                self.malformed += 1
                content += self._outside(CALL_START)  # another start mark may be inside
                continue
            self.calls.append(call)
            self._space.clear()
            self._follows_call = True
            at = min(end + len(CALL_END), len(text))
        rest = text[at:]
        begun = 0 if last else overlap(rest, CALL_START)
        self._mark = rest[len(rest) - begun :]
        content += self._outside(rest[: len(rest) - begun])
        if last and not self.calls:
            content += self._space
        return "".join(content)

    def _outside(self, text: str) -> Sequence[str]:
        """Return the addition to the content from more text outside of calls."""
        if self._follows_call:
            text = text.lstrip()
        body = text.rstrip()
        space = text[len(body) :]
        if not body:
            self._space.append(space)
            return ()
        separator = "\n" if self._follows_call and self._has_content else ""
        added = [separator, *self._space, body]
        self._space, self._has_content, self._follows_call = [space], True, False
        return added


def _json_call(text: str) -> Call | None:
    """Return a call from its JSON object, with the text of its arguments; None if the text is not a call."""
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
        ValueError: if the text is not a JSON object.
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
