"""Agents of libraries that do not fit beside our own packages, each in a few lines: `python ecosystem_clients.py AGENT URL KEY`.

Each asks where it is, lets the tool `look` answer, and prints the final text as JSON. None knows anything of Sluice.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

QUESTION = "Where is it?"
RESULT = "a cat"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}


def anthropic_whole(url: str, key: str) -> str:
    return _anthropic(url, key, streamed=False)


def anthropic_streamed(url: str, key: str) -> str:
    return _anthropic(url, key, streamed=True)


def _anthropic(url: str, key: str, *, streamed: bool) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key)
    tools: Any = [{"name": "look", "description": "Look.", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    assert client.messages.count_tokens(model="m", messages=messages, tools=tools).input_tokens > 0
    while True:
        given: Any = {"model": "m", "max_tokens": 100, "messages": messages, "tools": tools}
        if streamed:
            with client.messages.stream(**given) as stream:
                for _ in stream:
                    pass
                reply = stream.get_final_message()
        else:
            reply = client.messages.create(**given)
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in reply.content if block.type == "text")
        assert calls[0].input == {"place": "home"}, calls
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls]
        messages.append({"role": "user", "content": results})


def agents_responses(url: str, key: str) -> str:
    return asyncio.run(_agents(url, key, chat=False, streamed=False))


def agents_responses_streamed(url: str, key: str) -> str:
    return asyncio.run(_agents(url, key, chat=False, streamed=True))


def agents_chat(url: str, key: str) -> str:
    return asyncio.run(_agents(url, key, chat=True, streamed=False))


def agents_chat_streamed(url: str, key: str) -> str:
    return asyncio.run(_agents(url, key, chat=True, streamed=True))


async def _agents(url: str, key: str, *, chat: bool, streamed: bool) -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    kind = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    agent = agents.Agent(
        name="finder", instructions="Be brief.", tools=[agents.function_tool(look)], model=kind("m", client)
    )
    if not streamed:
        return str((await agents.Runner.run(agent, QUESTION)).final_output)
    run = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in run.stream_events():
        pass
    return str(run.final_output)


def look(place: str) -> str:
    """Look.

    Args:
        place: Where to look.
    """
    assert place == "home"
    return RESULT


def langgraph_openai(url: str, key: str) -> str:
    from langchain_openai import ChatOpenAI

    return _langgraph(ChatOpenAI(model="m", base_url=f"{url}/v1", api_key=key))


def langgraph_openai_responses(url: str, key: str) -> str:
    from langchain_openai import ChatOpenAI

    return _langgraph(ChatOpenAI(model="m", base_url=f"{url}/v1", api_key=key, use_responses_api=True))


def langgraph_anthropic(url: str, key: str) -> str:
    from langchain_anthropic import ChatAnthropic

    return _langgraph(ChatAnthropic(model="m", base_url=url, api_key=key, max_tokens=100))


def _langgraph(model: Any) -> str:
    from langgraph.prebuilt import create_react_agent

    result = create_react_agent(model, [look]).invoke({"messages": [("user", QUESTION)]})
    last = result["messages"][-1].content
    if isinstance(last, str):
        return last
    return "".join(block["text"] for block in last if block["type"] == "text")


def litellm_openai(url: str, key: str) -> str:
    return _litellm("openai/m", f"{url}/v1", key)


def litellm_anthropic(url: str, key: str) -> str:
    return _litellm("anthropic/m", url, key)


def _litellm(model: str, url: str, key: str) -> str:
    import litellm

    function = {"name": "look", "description": "Look.", "parameters": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        tools = [{"type": "function", "function": function}]
        reply = litellm.completion(
            model=model, api_base=url, api_key=key, messages=messages, tools=tools, max_tokens=100
        )
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls]


if __name__ == "__main__":
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    name, base_url, session_key = sys.argv[1:]
    print(json.dumps({"final": globals()[name](base_url, session_key)}))
