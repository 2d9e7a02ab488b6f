"""Conversations at a replica: what continues ids keeps them or is rendered whole, and what was said comes back as a message."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from rollout_stack import Replica, refused, running_engine
from small_models import CONTEXT, EOS, VOCABULARY, save_model, text_of, tokenizer

from sluice.end_tokens import SENTINEL
from sluice.v1 import rollout_pb2, tokens_pb2

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

UNKNOWN, USER, ASSISTANT, TOOL, CALL, THINK = 0, 10, 11, 12, 13, 15
CALL_TEXT = '<tool_call>{"name":"look", "arguments": {"x":1}}</tool_call>'
"""Text of the token CALL, which the template writes with other spaces, and which no text is encoded to."""
TOOLS = [tokens_pb2.Tool(name="look")]

TEMPLATE = (  # roles and calls are single tokens; as many do, it leaves out the reasoning before the last question
    "{%- set last = namespace(user=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    f"{{%- if m.role == 'user' -%}}{{{{- '{text_of([USER])}' + m.content -}}}}"
    f"{{%- elif m.role == 'tool' -%}}{{{{- '{text_of([TOOL])}' + m.content -}}}}"
    f"{{%- elif m.role == 'assistant' -%}}{{{{- '{text_of([ASSISTANT])}' -}}}}"
    f"{{%- if m.reasoning_content and loop.index0 > last.user -%}}{{{{- '{text_of([THINK])}' + m.reasoning_content + '{text_of([THINK])}' -}}}}{{%- endif -%}}"
    "{{- m.content -}}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments}|tojson + '</tool_call>' -}}"
    "{%- endfor -%}{{- '<end>' -}}"
    "{%- else -%}{{- raise_exception('no role ' ~ m.role) -}}{%- endif -%}{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{text_of([ASSISTANT])}' -}}}}{{%- endif -%}}"
)
A, B, C = (text_of([id_]) for id_ in (20, 21, 22))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("continues") / "small", 1)
    speaking = tokenizer({CALL: CALL_TEXT})
    speaking.chat_template = TEMPLATE
    speaking.save_pretrained(directory)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(model):
    async with running_engine(model) as engine, Replica(model, engine) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(replica):
    async with replica.stub() as stub:
        yield stub


def user(content: str) -> tokens_pb2.ChatMessage:
    return tokens_pb2.ChatMessage(role="user", content=content)


def assistant(content: str, **fields: str) -> tokens_pb2.ChatMessage:
    return tokens_pb2.ChatMessage(role="assistant", content=content, **fields)


def ask(
    messages: list[tokens_pb2.ChatMessage], ids: list[int], known: int, *, only_as_rendered: bool = False
) -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(
        conversation=tokens_pb2.Conversation(messages=messages),
        continues=rollout_pb2.Continuation(token_ids=ids, messages=known, only_as_rendered=only_as_rendered),
        sampling=tokens_pb2.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
    )


SAID = [user(A), assistant(B), user(C)]
SAMPLED = [USER, 20, ASSISTANT, 33, 34, EOS]
"""What was sampled is not what the caller sends back as its text; the ids count."""


async def test_the_ids_are_kept_and_the_rest_is_appended(agent):
    whole = await agent.Generate(ask(SAID, SAMPLED, 2))
    assert whole.continued
    assert list(whole.prompt_token_ids) == [*SAMPLED, USER, 22, ASSISTANT]
    messages = [
        each async for each in agent.GenerateStream(rollout_pb2.GenerateStreamRequest(request=ask(SAID, SAMPLED, 2)))
    ]
    assert messages[0].opening.continued
    assert messages[0].opening.prompt_token_ids == whole.prompt_token_ids


async def test_a_turn_that_was_cut_off_is_closed(agent):
    answer = await agent.Generate(ask(SAID, SAMPLED[:-1], 2))
    assert list(answer.prompt_token_ids) == [*SAMPLED, USER, 22, ASSISTANT]


async def test_what_the_template_cannot_append_is_rendered_whole(agent):
    confused = [user(SENTINEL), assistant(B), user(C)]  # where does the turn end?
    answer = await agent.Generate(ask(confused, SAMPLED, 2))
    assert not answer.continued
    assert list(answer.prompt_token_ids) == [USER, *[UNKNOWN] * len(SENTINEL), ASSISTANT, 21, EOS, USER, 22, ASSISTANT]


async def test_only_what_the_template_would_render_is_continued_where_that_is_asked_for(agent):
    same = await agent.Generate(ask(SAID, [USER, 20, ASSISTANT, 21, EOS], 2, only_as_rendered=True))
    assert same.continued
    other = await agent.Generate(ask(SAID, SAMPLED, 2, only_as_rendered=True))
    assert not other.continued
    assert same.prompt_token_ids == other.prompt_token_ids == [USER, 20, ASSISTANT, 21, EOS, USER, 22, ASSISTANT]


async def test_a_template_that_leaves_out_earlier_reasoning_continues_only_if_that_does_not_matter(agent):
    thought = [user(A), assistant(B, reasoning=C), user(C)]
    ids = [USER, 20, ASSISTANT, THINK, 22, THINK, 21, EOS]
    kept = await agent.Generate(ask(thought, ids, 2))
    assert kept.continued
    assert list(kept.prompt_token_ids) == [*ids, USER, 22, ASSISTANT]
    dropped = await agent.Generate(ask(thought, ids, 2, only_as_rendered=True))
    assert not dropped.continued
    assert list(dropped.prompt_token_ids) == [USER, 20, ASSISTANT, 21, EOS, USER, 22, ASSISTANT]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda request: request.continues.ClearField("messages"), "continues.messages"),
        (lambda request: setattr(request.continues, "messages", 3), "continues.messages"),
        (lambda request: setattr(request.continues, "messages", 1), "continues.messages"),
        (lambda request: request.continues.ClearField("token_ids"), "continues.token_ids"),
        (lambda request: request.continues.token_ids.append(VOCABULARY), "continues.token_ids"),
        (lambda request: request.continues.token_ids.extend([20] * CONTEXT), "continues.token_ids"),
        (lambda request: request.continues.token_ids.extend([20] * (CONTEXT - len(SAMPLED) - 2)), "conversation"),
        (lambda request: setattr(request, "text", A), "continues"),
        (lambda request: request.token_ids.ids.append(20), "continues"),
        (lambda request: request.ClearField("conversation"), "continues"),
    ],
)
async def test_a_wrong_continuation_is_refused_with_its_field(agent, change, field):
    request = ask(SAID, SAMPLED, 2)
    change(request)
    error = await refused(agent.Generate(request))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(error.violations) == [field]


async def test_the_ids_of_many_turns_with_tools_stay_as_they_were_sampled(agent):
    """Each prompt begins with the prompt and the sample before it, also where encoding their text would give other ids."""
    chance = random.Random(0)
    turns = calls = 0
    for _ in range(200):
        messages = [user(A * chance.randint(1, 5))]
        request = ask(messages, [], 0)
        request.ClearField("continues")
        before, added = [], [USER, *[20] * len(messages[0].content), ASSISTANT]
        for turn in range(chance.randint(2, 4)):
            request.sampling.temperature, request.sampling.max_tokens = 1.0, chance.randint(1, 8)
            request.sampling.ignore_eos, request.return_message = False, True
            request.sampling.logit_bias[CALL] = 12.0
            request.conversation.tools.extend(TOOLS)
            answer = await agent.Generate(request)
            sample = answer.samples[0]
            assert answer.continued == bool(turn)
            assert list(answer.prompt_token_ids) == before + added
            before = [*answer.prompt_token_ids, *sample.token_ids]
            # As a client does: the message as it came, then the results of its calls or another question.
            results = [
                tokens_pb2.ChatMessage(role="tool", tool_call_id=call.id, name=call.name, content=A)
                for call in sample.message.tool_calls
            ]
            assert len(results) == list(sample.token_ids).count(CALL)
            follows = results or [user(A)]
            messages += [sample.message, *follows]
            request = ask(messages, before, len(messages) - len(follows))
            role = TOOL if results else USER
            added = ([] if before[-1] == EOS else [EOS]) + [role, 20] * len(follows) + [ASSISTANT]
            turns, calls = turns + 1, calls + len(results)
    assert turns > 400
    assert calls > turns // 2


OPENAI_TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("called", [True, False])
async def test_openais_client_gets_tool_calls(replica, stream, called):
    """One token is the call, another is text."""
    token = CALL if called else 20
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{replica.http_port}/v1", api_key="none") as client:
        asked: Any = {
            "model": str(replica.model),
            "messages": [{"role": "user", "content": A}],
            "tools": OPENAI_TOOLS,
            "logit_bias": {str(token): 100.0},
            "max_tokens": 4,
            "temperature": 0,
            "extra_body": {"return_token_ids": True, "stop_token_ids": [token]},
        }
        if stream:
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
            message, reason = chunks[-1].choices[0].delta, chunks[-1].choices[0].finish_reason
            ids = [id_ for chunk in chunks for id_ in getattr(chunk.choices[0], "token_ids", None) or []]
        else:
            choice = (await client.chat.completions.create(**asked)).choices[0]
            message, reason, ids = choice.message, choice.finish_reason, choice.token_ids
    assert ids == [token]
    if called:
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("look", '{"x":1}')]
        assert (message.content, reason) == (None, "tool_calls")
    else:
        assert (message.content, message.tool_calls, reason) == (A, None, "stop")


async def test_a_stream_has_the_message_with_the_last_tokens_of_each_sample(agent):
    request = rollout_pb2.GenerateRequest(
        conversation=tokens_pb2.Conversation(messages=[user(A)], tools=TOOLS),
        sampling=tokens_pb2.SamplingParams(max_tokens=6, temperature=1, ignore_eos=True, logit_bias={CALL: 12.0}),
        n=3,
        return_message=True,
    )
    wire = rollout_pb2.GenerateStreamRequest(request=request, coalesce_tokens=1)
    ids: dict[int, list[int]] = {}
    messages: dict[int, tokens_pb2.ChatMessage] = {}
    async for part in agent.GenerateStream(wire):
        for delta in part.chunk.deltas:
            new = delta.tokens
            ids.setdefault(new.index, []).extend(new.token_ids)
            assert new.HasField("message") == bool(new.finish_reason)
            if new.HasField("message"):
                messages[new.index] = new.message
    assert sorted(messages) == [0, 1, 2]
    for index, message in messages.items():
        assert len(message.tool_calls) == ids[index].count(CALL)
        assert "".join(message.content.split()) == text_of([id_ for id_ in ids[index] if id_ not in {CALL, EOS, 0}])
    assert sum(len(message.tool_calls) for message in messages.values())


async def test_a_stream_tells_what_each_sample_says_as_it_is_known(agent):
    """Text comes with its token. A call comes with the message, and the text of a stream is that of the whole answer."""
    request = rollout_pb2.GenerateRequest(
        conversation=tokens_pb2.Conversation(messages=[user(A)], tools=TOOLS),
        sampling=tokens_pb2.SamplingParams(
            max_tokens=24, temperature=1, ignore_eos=True, seed=5, logit_bias={CALL: 4.0}
        ),
        n=4,
        return_message=True,
    )
    whole = await agent.Generate(request)
    wire = rollout_pb2.GenerateStreamRequest(request=request, coalesce_tokens=1)
    ids: dict[int, list[int]] = {}
    content: dict[int, str] = {}
    early = 0
    async for part in agent.GenerateStream(wire):
        for delta in part.chunk.deltas:
            new = delta.tokens
            ids.setdefault(new.index, []).extend(new.token_ids)
            told = content[new.index] = content.get(new.index, "") + delta.content
            shown = text_of([id_ for id_ in ids[new.index] if id_ not in {CALL, EOS, UNKNOWN}])
            if not new.finish_reason:
                assert "".join(told.split()) == shown, "no text waits for the end"
                early += bool(delta.content)
            else:
                assert told == new.message.content
    assert early > len(content), "most text comes before the end"
    for sample in whole.samples:
        assert ids[sample.index] == list(sample.token_ids)
        assert content[sample.index] == sample.message.content
    assert any(sample.message.tool_calls for sample in whole.samples)


async def test_openais_client_gets_text_before_a_call(replica):
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{replica.http_port}/v1", api_key="none") as client:
        asked: Any = {
            "model": str(replica.model),
            "messages": [{"role": "user", "content": A}],
            "tools": OPENAI_TOOLS,
            "logit_bias": {"20": 100.0},
            "max_tokens": 200,
            "temperature": 0,
        }
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        whole = (await client.chat.completions.create(**asked)).choices[0].message.content
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(texts) == whole == A * 200
    assert len(texts) > 2, "64 tokens of a sample make a message"
