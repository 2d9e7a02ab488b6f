"""What OpenAI's own client does through a gateway, and that the tokens of each turn continue those of the one before it."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from memory_sessions import END, prompt_ids
from pydantic import BaseModel

from sluice.v1 import tokens_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": TOOL, "strict": True}}
]
RESPONSES_TOOLS: Any = [
    {"type": "function", "name": "look", "parameters": TOOL, "strict": True},
    {"type": "web_search"},
]
USER: Any = [{"role": "user", "content": "Where is it?"}]


def client_of(gateway: Any, **settings: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        **(
            {"base_url": f"{gateway.url}/v1", "api_key": gateway.session.key, "max_retries": 0, "timeout": 60}
            | settings
        )
    )


def chain(gateway: Any) -> list[str]:
    """The generations of the session, each the parent of the next; their tokens continue each other."""
    generations = gateway.session.generations
    for name, each in generations.items():
        if each.parent:
            parent = generations[each.parent]
            before = parent.prompt + parent.sampled
            assert each.prompt[: len(before)] == before, name
    names = list(generations)
    assert [each.parent for each in generations.values()] == ["", *names[:-1]]
    return names


class Answer(BaseModel):
    place: str


class TestChat:
    async def test_whole(self, gateway):
        async with client_of(gateway) as client:
            reply = await client.chat.completions.create(
                model="any-name", messages=USER, logprobs=True, extra_body={"return_token_ids": True}
            )
        assert reply.choices[0].message.content == "You said: Where is it?"
        assert (reply.choices[0].finish_reason, reply.model) == ("stop", "any-name")
        (name,) = chain(gateway)
        recorded = gateway.session.generations[name]
        assert reply.id == name
        extra: Any = reply.choices[0].model_extra
        assert (reply.model_extra or {})["prompt_token_ids"] == recorded.prompt
        assert extra["token_ids"] == recorded.sampled
        assert [each.logprob for each in reply.choices[0].logprobs.content] == [-0.25] * len(recorded.sampled)
        assert reply.choices[0].logprobs.content[-1].token == f"token_id:{END}"
        assert reply.usage.total_tokens == len(recorded.prompt) + len(recorded.sampled)

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_tools(self, gateway, streamed):
        messages: list[Any] = list(USER)
        async with client_of(gateway) as client:
            for _ in range(2):
                if streamed:
                    async with client.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as stream:
                        async for _event in stream:
                            pass
                        reply = await stream.get_final_completion()
                else:
                    reply = await client.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_unset=True))
                if message.tool_calls:
                    assert reply.choices[0].finish_reason == "tool_calls"
                    (call,) = message.tool_calls
                    assert (call.function.name, call.function.arguments) == ("look", '{"place":"home"}')
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "a cat"})
        assert message.content == "It said a cat."
        assert len(chain(gateway)) == 2

    async def test_stream(self, gateway):
        async with client_of(gateway) as client:
            stream = await client.chat.completions.create(
                model="m", messages=USER, n=2, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        texts = ["", ""]
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == ["You said: Where is it?"] * 2
        assert {chunk.id for chunk in chunks} == {next(iter(gateway.session.generations))}
        assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]) == 2
        assert chunks[-1].usage.completion_tokens == 2 * len(next(iter(gateway.session.generations.values())).sampled)

    async def test_a_schema_is_asked_for_and_not_enforced(self, gateway):
        gateway.sessions.say = lambda _: tokens_pb2.ChatMessage(role="assistant", content='{"place": "home"}')
        async with client_of(gateway) as client:
            reply = await client.chat.completions.parse(model="m", messages=USER, response_format=Answer)
        assert reply.choices[0].message.parsed == Answer(place="home")
        assert ("not_enforced", "response_format.json_schema") in gateway.session.requests[0].notices

    async def test_a_history_that_was_rewritten_forks(self, gateway):
        async with client_of(gateway) as client:
            await client.chat.completions.create(model="m", messages=USER)
            other: Any = [*USER, {"role": "assistant", "content": "I said no."}, *USER]
            await client.chat.completions.create(model="m", messages=other)
        assert [each.parent for each in gateway.session.generations.values()] == ["", ""]


class TestCompletions:
    @pytest.mark.parametrize("prompt", ["once", [5, 6, 7], [[5, 6, 7]]])
    async def test_whole(self, gateway, prompt):
        async with client_of(gateway) as client:
            reply = await client.completions.create(model="m", prompt=prompt, logprobs=0)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("more text", "stop")
        assert reply.choices[0].logprobs.token_logprobs[-1] == -0.25
        assert gateway.session.requests[0].generate.sampling.max_tokens == 16

    async def test_stream(self, gateway):
        async with client_of(gateway) as client:
            chunks = [chunk async for chunk in await client.completions.create(model="m", prompt="once", stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "more text"
        assert chunks[-1].choices[0].finish_reason == "stop"

    async def test_token_ids_that_continue_a_generation_are_its_child(self, gateway):
        async with client_of(gateway) as client:
            await client.completions.create(model="m", prompt=[5, 6, 7])
            first = next(iter(gateway.session.generations.values()))
            await client.completions.create(model="m", prompt=[*first.prompt, *first.sampled, 9])
        assert len(chain(gateway)) == 2


class TestResponses:
    async def test_whole(self, gateway):
        async with client_of(gateway) as client:
            reply = await client.responses.create(model="any-name", input="Where is it?", instructions="Be brief.")
        assert (reply.output_text, reply.status, reply.model) == ("You said: Where is it?", "completed", "any-name")
        assert chain(gateway) == [reply.id]
        roles = [each.role for each in gateway.session.requests[0].generate.conversation.messages]
        assert roles == ["system", "user"]

    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize("history", ["sent", "named"])
    async def test_tools(self, gateway, streamed, history):
        given: dict[str, Any] = {"model": "m", "instructions": "Be brief.", "tools": RESPONSES_TOOLS}
        items: list[Any] = list(USER)
        async with client_of(gateway) as client:
            for _ in range(2):
                if streamed:
                    async with client.responses.stream(**given, input=items) as stream:
                        async for _event in stream:
                            pass
                        reply = await stream.get_final_response()
                else:
                    reply = await client.responses.create(**given, input=items)
                calls = [item for item in reply.output if item.type == "function_call"]
                outputs = [
                    {"type": "function_call_output", "call_id": each.call_id, "output": "a cat"} for each in calls
                ]
                if history == "named":
                    items = outputs
                    given["previous_response_id"] = reply.id
                else:
                    items += [item.model_dump(exclude_unset=True) for item in reply.output] + outputs
        assert reply.output_text == "It said a cat."
        assert [item.type for item in reply.output] == ["reasoning", "message"]
        assert len(chain(gateway)) == 2
        assert ("left_out", "tool.web_search") in gateway.session.requests[0].notices

    async def test_events_are_numbered_and_end_with_the_response(self, gateway):
        async with client_of(gateway) as client:
            events = [event async for event in await client.responses.create(model="m", input="Hello", stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert events[-1].response.output_text == "You said: Hello"
        assert events[-1].response.usage.output_tokens > 0

    async def test_a_reply_that_was_cut_is_incomplete(self, gateway):
        gateway.sessions.finish = tokens_pb2.FINISH_REASON_LENGTH
        async with client_of(gateway) as client:
            reply = await client.responses.create(model="m", input="Hello")
        assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    async def test_a_response_of_another_session_is_not_known(self, gateway):
        async with client_of(gateway) as client:
            reply = await client.responses.create(model="m", input="Hello")
        other = gateway.sessions.new()
        async with client_of(gateway, api_key=other.key) as client:
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model="m", input="Hello", previous_response_id=reply.id)


async def test_any_model_name_is_served(gateway):
    async with client_of(gateway) as client:
        (listed,) = (await client.models.list()).data
        assert (await client.models.retrieve("gpt/any")).id == "gpt/any"
    assert (listed.id, listed.model_extra["max_model_len"]) == ("small", 200_000)


async def test_a_stop_string_is_not_shown_and_the_turn_continues(gateway):
    gateway.sessions.say = lambda _: tokens_pb2.ChatMessage(role="assistant", content="one STOP")
    gateway.sessions.stop_string = " STOP"
    messages: list[Any] = list(USER)
    async with client_of(gateway) as client:
        for _ in range(2):
            reply = await client.chat.completions.create(model="m", messages=messages, stop=[" STOP"], tools=CHAT_TOOLS)
            assert reply.choices[0].message.content == "one"
            messages += [reply.choices[0].message.model_dump(), *USER]
    assert len(chain(gateway)) == 2


async def test_prompts_are_rendered_as_sent(gateway):
    async with client_of(gateway) as client:
        await client.chat.completions.create(model="m", messages=USER)
    expected = tokens_pb2.Conversation(messages=[tokens_pb2.ChatMessage(role="user", content="Where is it?")])
    assert next(iter(gateway.session.generations.values())).prompt == prompt_ids(expected)
