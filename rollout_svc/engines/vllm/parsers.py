"""vLLM's own parsers of tool calls and reasoning, for models whose format `rollout_svc.replies` does not read."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from rollout_svc.replies import PROBE_TOOLS, Call, ReadCalls, ReadReasoning, Said, call_marks
from sluice.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = structlog.get_logger()


def tool_reader(tokenizer: PreTrainedTokenizerBase, name: str) -> ReadCalls:
    """Return the tool parser of this name.

    Raises:
        ConfigError: if vLLM has none, or it does not fit the tokenizer.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415 - takes seconds
    from vllm.parser.parser_manager import ParserManager  # noqa: PLC0415

    parser = _found(
        "tool_parser", name, lambda: ParserManager.get_parser(name, None, enable_auto_tools=True, tokenizer=tokenizer)
    )
    special = _special_tokens(tokenizer)
    marks = call_marks(tokenizer)

    def read(text: str, tools: Sequence[Mapping[str, Any]]) -> Said:
        request = ChatCompletionRequest(messages=[], model="", tools=list(tools), tool_choice="auto")
        ids = tokenizer.encode(text, add_special_tokens=False)
        _, content, calls = parser(tokenizer, request.tools).parse(
            text, request, enable_auto_tools=True, model_output_token_ids=ids
        )
        found = [Call(call.name, call.arguments) for call in calls or ()]
        begun = (text.count(mark) - sum(call.arguments.count(mark) for call in found) for mark in marks)
        malformed = max(0, max(begun, default=0) - len(found))
        if not found:  # a parser may omit parts of a malformed call
            return Said(special.sub("", text), malformed=malformed)
        return Said(special.sub("", content or ""), found, malformed)

    _check_it_reads("tool_parser", name, lambda: read("", PROBE_TOOLS))
    return read


def reasoning_reader(tokenizer: PreTrainedTokenizerBase, name: str) -> ReadReasoning:
    """Return the reasoning parser of this name.

    Raises:
        ConfigError: if vLLM has none, or it does not fit the tokenizer.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415 - takes seconds
    from vllm.parser.parser_manager import ParserManager  # noqa: PLC0415

    parser = _found("reasoning_parser", name, lambda: ParserManager.get_parser(None, name, tokenizer=tokenizer))

    def read(text: str, opened: bool) -> tuple[str, str]:
        del opened
        request = ChatCompletionRequest(messages=[], model="")
        reasoning, content = parser(tokenizer).extract_reasoning(text, request)
        return reasoning or "", content or ""

    _check_it_reads("reasoning_parser", name, lambda: read("", False))
    return read


def find_tool_parser(tokenizer: PreTrainedTokenizerBase, fits: Callable[[ReadCalls], bool]) -> str:
    """Return the name of the first tool parser that fits, and "none" if none does."""
    from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415 - takes seconds

    vllm_log = logging.getLogger("vllm")
    level = vllm_log.level
    vllm_log.setLevel(logging.CRITICAL)  # each parser that does not fit would log an error
    try:
        for name in ToolParserManager.list_registered():
            try:
                if fits(tool_reader(tokenizer, name)):
                    return str(name)
            except Exception as error:  # noqa: BLE001 - a parser of another model may fail in any way
                log.debug("a tool parser does not fit", parser=name, problem=str(error)[:200])
    finally:
        vllm_log.setLevel(level)
    return "none"


def _found(setting: str, name: str, find: Callable[[], Any]) -> Any:  # noqa: ANN401 - vLLM's class
    try:
        return find()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # if vLLM cannot import a parser, it reports an unknown parser
            cause = cause.__cause__
        raise ConfigError(f"rollout.{setting} is {name!r}, which vLLM refuses: {cause}") from error


def _check_it_reads(setting: str, name: str, read: Callable[[], object]) -> None:
    """Refuse a parser that only names a format, such as the parsers of gpt-oss: other code in vLLM reads that format."""
    try:
        read()
    except NotImplementedError as error:
        raise ConfigError(f"rollout.{setting} is {name!r}, which vLLM cannot use by itself: {error}") from error
    except Exception as error:  # noqa: BLE001 - an empty reply may be refused in any way; replies are read one by one
        log.debug("a parser refuses an empty reply", parser=name, problem=str(error)[:200])


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    names = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
