"""CPU time of a gateway's own work for one request: read and parse its body, find the keys of its history, write its response.

Prints milliseconds for the requests of two coding agents in their tenth turn, and for a short chat.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from gateway_svc.canonical import conversation_keys
from gateway_svc.recording import settle_sampling
from sluice.config import Options, whole_number
from sluice.openai import chat, messages, responses
from sluice.openai.answers import Begun, Reply, Result
from sluice.openai.bodies import ClientRequest, read_body
from sluice.v1 import episode_pb2, rollout_pb2, tokens_pb2

TURNS = 10
REPLY_TOKENS = 64
SCHEMA = {
    "type": "object",
    "properties": {f"field_{n}": {"type": "string", "description": "What it is for. " * 4} for n in range(10)},
    "required": ["field_1"],
}


@dataclass(frozen=True)
class Case:
    """One kind of request.

    Attributes:
        body: The body.
        kind: Form of the body.
        parse: Parses the body.
        reply: Returns the writer of the response.
    """

    body: Mapping[str, Any]
    kind: type[BaseModel]
    parse: Callable[[Any], ClientRequest]
    reply: Callable[[Any], Reply]


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure; return the milliseconds of each part."""
    parser = Options(prog="sluice bench dialects", description=run.__doc__)
    parser.add_argument("--repeats", type=whole_number(1), default=200, help="measurements of each part")
    options = parser.parse_args(argv)
    cases = {
        "messages_cli": Case(_messages(), messages.MessagesBody, messages.parse, messages.MessagesReply),
        "responses_cli": Case(_responses(), responses.ResponsesBody, responses.parse, responses.ResponsesReply),
        "chat_short": Case(_chat(), chat.ChatBody, chat.parse, chat.ChatReply),
    }
    return {name: _measure(name, case, options.repeats) for name, case in cases.items()}


def _measure(name: str, case: Case, repeats: int) -> dict[str, float]:
    raw = json.dumps(case.body).encode()
    body = read_body(case.kind, raw)
    conversation = case.parse(body).generate.conversation
    result = _result()
    parts: dict[str, Callable[[], object]] = {
        "read": lambda: read_body(case.kind, raw),
        "parse": lambda: settle_sampling(case.parse(body), "override"),
        "keys": lambda: conversation_keys(conversation),
        "whole": lambda: json.dumps(case.reply(body).whole(result)),
        "stream": lambda: _stream(case.reply(body), result),
    }
    measured = {f"{part}_ms": _milliseconds(work, repeats) for part, work in parts.items()}
    print(
        f"{name:<14}{len(raw) / 1000:6.1f} kB  " + "  ".join(f"{part} {value:.3f}" for part, value in measured.items())
    )
    return {"bytes": len(raw), **measured}


def _stream(reply: Reply, result: Result) -> bytes:
    return b"".join([*reply.opening(Begun("r", len(result.prompt_token_ids))), *reply.ending(result)])


def _milliseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    taken = []
    for _ in range(repeats):
        begun = time.thread_time()
        work()
        taken.append(time.thread_time() - begun)
    return round(1000 * statistics.median(taken), 4)


def _result() -> Result:
    call = tokens_pb2.ToolCall(id="call_1", name="tool_1", arguments=json.dumps({"field_1": "value " * 20}))
    message = tokens_pb2.ChatMessage(role="assistant", content="I look. " * 10, tool_calls=[call])
    sample = rollout_pb2.GeneratedSample(
        token_ids=range(REPLY_TOKENS), logprobs=[-0.5] * REPLY_TOKENS, finish_reason=tokens_pb2.FINISH_REASON_STOP
    )
    return Result(
        generations=[episode_pb2.EpisodeGeneration(generation_id="r/0", message=message, sample=sample)],
        prompt_token_ids=range(12_000),
    )


def _messages() -> dict[str, Any]:
    turns: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Find it. " * 40}]}]
    for turn in range(TURNS):
        call = {"type": "tool_use", "id": f"call_{turn}", "name": "tool_1", "input": {"field_1": "value " * 10}}
        answer = {"type": "tool_result", "tool_use_id": f"call_{turn}", "content": "what it printed " * 40}
        turns += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]
    tools = [{"name": f"tool_{n}", "description": "What it does. " * 60, "input_schema": SCHEMA} for n in range(12)]
    system = [{"type": "text", "text": "You are an agent. " * 700}]
    return {"model": "m", "max_tokens": 32_000, "stream": True, "system": system, "tools": tools, "messages": turns}


def _responses() -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": "Find it. " * 40}]}]
    for turn in range(TURNS):
        call = {
            "type": "function_call",
            "call_id": f"call_{turn}",
            "name": "tool_1",
            "arguments": '{"field_1": "value"}',
        }
        answer = {"type": "function_call_output", "call_id": f"call_{turn}", "output": "what it printed " * 40}
        items += [call, answer]
    tools = [
        {"type": "function", "name": f"tool_{n}", "description": "d " * 200, "parameters": SCHEMA} for n in range(7)
    ]
    return {"model": "m", "stream": True, "instructions": "You are an agent. " * 1000, "tools": tools, "input": items}


def _chat() -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"}],
    }
