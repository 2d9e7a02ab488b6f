"""A request that continues ids keeps them and appends the rest of its conversation, or renders it whole and says so."""

from __future__ import annotations

import json
import random
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from rollout_stack import Replica, refused, running_engine
from small_models import CONTEXT, EOS, VOCABULARY, save_model, text_of
from transformers import AutoTokenizer

from sluice.render import SENTINEL
from sluice.v1 import rollout_pb2, tokens_pb2

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

UNKNOWN, USER, ASSISTANT, TOOL, CALL, CALL_END, THINK = 0, 10, 11, 12, 13, 14, 15
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
    f"{{{{- '{text_of([CALL])}' + call.function.name + (call.function.arguments.x or '') + '{text_of([CALL_END])}' -}}}}"
    "{%- endfor -%}{{- '<end>' -}}"
    "{%- else -%}{{- raise_exception('no role ' ~ m.role) -}}{%- endif -%}{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{text_of([ASSISTANT])}' -}}}}{{%- endif -%}}"
)
A, B, C = (text_of([id_]) for id_ in (20, 21, 22))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("continues") / "small", 1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
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
    turns = 0
    for _ in range(200):
        messages = [user(A * chance.randint(1, 5))]
        request = ask(messages, [], 0)
        request.ClearField("continues")
        before, added = [], [USER, *[20] * len(messages[0].content), ASSISTANT]
        for turn in range(chance.randint(2, 4)):
            request.sampling.temperature, request.sampling.max_tokens = 1.0, chance.randint(1, 8)
            request.sampling.ignore_eos = False
            answer = await agent.Generate(request)
            assert answer.continued == bool(turn)
            assert list(answer.prompt_token_ids) == before + added
            before = [*answer.prompt_token_ids, *answer.samples[0].token_ids]
            call = tokens_pb2.ToolCall(id=f"c{turn}", name=B, arguments=json.dumps({"x": A}))
            if chance.random() < 0.6:
                said, role = tokens_pb2.ChatMessage(role="assistant", content=C, tool_calls=[call]), TOOL
                follows = tokens_pb2.ChatMessage(role="tool", tool_call_id=call.id, name=B, content=A)
            else:
                said, role, follows = assistant(C), USER, user(A)
            messages += [said, follows]
            request = ask(messages, before, len(messages) - 1)
            added = ([] if before[-1] == EOS else [EOS]) + [role, 20, ASSISTANT]
            turns += 1
    assert turns > 400
