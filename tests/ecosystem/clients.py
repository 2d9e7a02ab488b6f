"""Agents of libraries that do not fit beside our own packages, each in a few lines: `python clients.py AGENT`.

Each line of standard input is a question as JSON: `url`, `key`, and whether to stream and to offer the tool `look`. Each line of output is
what the agent says last, or its error. None knows anything of Sluice.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

WHERE, HELLO = "Where is it?", "Say hello."
RESULT = "a cat"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}


def look(place: str) -> str:
    """Look.

    Args:
        place: Where to look.
    """
    assert place == "home"
    return RESULT


def openai_chat(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    function = {"name": "look", "description": "Look.", "parameters": SCHEMA, "strict": True}
    given: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": WHERE if tools else HELLO}]}
    given |= {"tools": [{"type": "function", "function": function}]} if tools else {}
    while True:
        if streamed:
            with client.chat.completions.stream(**given) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**given).choices[0].message
        given["messages"].append(message.model_dump(exclude_unset=True, exclude={"parsed"}))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            said = look(**json.loads(call.function.arguments))
            given["messages"].append({"role": "tool", "tool_call_id": call.id, "content": said})


def openai_responses(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    given: dict[str, Any] = {"model": "m", "input": [{"role": "user", "content": WHERE if tools else HELLO}]}
    given |= {"tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]} if tools else {}
    while True:
        if streamed:
            with client.responses.stream(**given) as stream:
                reply: Any = stream.get_final_response()
        else:
            reply = client.responses.create(**given)
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return str(reply.output_text)
        given["previous_response_id"] = reply.id
        results = [(call.call_id, look(**json.loads(call.arguments))) for call in calls]
        given["input"] = [{"type": "function_call_output", "call_id": id_, "output": said} for id_, said in results]


def openai_completions(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    import openai

    assert not tools
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    if not streamed:
        return client.completions.create(model="m", prompt=HELLO).choices[0].text
    chunks = client.completions.create(model="m", prompt=HELLO, stream=True)
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def anthropic_messages(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key)
    given: Any = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": WHERE if tools else HELLO}]}
    given |= {"tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}]} if tools else {}
    while True:
        if streamed:
            with client.messages.stream(**given) as stream:
                reply = stream.get_final_message()
        else:
            reply = client.messages.create(**given)
        given["messages"].append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": look(**call.input)} for call in calls]
        given["messages"].append({"role": "user", "content": results})


def agents_responses(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    return asyncio.run(_agents(url, key, chat=False, streamed=streamed, tools=tools))


def agents_chat(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    return asyncio.run(_agents(url, key, chat=True, streamed=streamed, tools=tools))


async def _agents(url: str, key: str, *, chat: bool, streamed: bool, tools: bool) -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    kind = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    offered = [agents.function_tool(look)] if tools else []
    agent = agents.Agent(name="finder", instructions="Be brief.", tools=offered, model=kind("m", client))
    question = WHERE if tools else HELLO
    if not streamed:
        return str((await agents.Runner.run(agent, question)).final_output)
    run = agents.Runner.run_streamed(agent, question)
    async for _ in run.stream_events():
        pass
    return str(run.final_output)


def langgraph_chat(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    from langchain_openai import ChatOpenAI

    return _langgraph(ChatOpenAI(model="m", base_url=f"{url}/v1", api_key=key, streaming=streamed), tools)


def langgraph_responses(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", base_url=f"{url}/v1", api_key=key, streaming=streamed, use_responses_api=True)
    return _langgraph(model, tools)


def langgraph_messages(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    from langchain_anthropic import ChatAnthropic

    return _langgraph(ChatAnthropic(model="m", base_url=url, api_key=key, max_tokens=100, streaming=streamed), tools)


def _langgraph(model: Any, tools: bool) -> str:
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(model, [look] if tools else [])
    last = agent.invoke({"messages": [("user", WHERE if tools else HELLO)]})["messages"][-1].content
    return last if isinstance(last, str) else "".join(block["text"] for block in last if block["type"] == "text")


def litellm_chat(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    return _litellm("openai/m", f"{url}/v1", key, streamed, tools)


def litellm_messages(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    return _litellm("anthropic/m", url, key, streamed, tools)


def _litellm(model: str, url: str, key: str, streamed: bool, tools: bool) -> str:
    import litellm

    function = {"name": "look", "description": "Look.", "parameters": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": WHERE if tools else HELLO}]
    given: dict[str, Any] = {"model": model, "api_base": url, "api_key": key, "max_tokens": 100, "num_retries": 3}
    given |= {"tools": [{"type": "function", "function": function}]} if tools else {}
    while True:
        reply: Any = litellm.completion(messages=messages, stream=streamed, **given)
        if streamed:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            said = look(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def smolagents_chat(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    import smolagents

    model = smolagents.OpenAIModel("m", api_base=f"{url}/v1", api_key=key)
    if tools:
        agent = smolagents.ToolCallingAgent(
            [smolagents.tool(look)], model, stream_outputs=streamed, verbosity_level=0, max_steps=3
        )
        return str(agent.run(WHERE))
    asked = [smolagents.ChatMessage(role=smolagents.MessageRole.USER, content=HELLO)]
    if not streamed:
        return str(model.generate(asked).content)
    return "".join(part.content or "" for part in model.generate_stream(asked))


def verifiers_chat(url: str, key: str, *, streamed: bool, tools: bool) -> str:
    assert not streamed
    return asyncio.run(_verifiers(f"{url}/v1", key, tools))


async def _verifiers(url: str, key: str, tools: bool) -> str:
    import verifiers as vf
    from datasets import Dataset
    from verifiers.types import ClientConfig

    os.environ["SESSION_KEY"] = key
    rows = Dataset.from_list([{"question": WHERE if tools else HELLO, "answer": ""}])
    rubric = vf.Rubric(funcs=[lambda **_: 1.0])
    env = (
        vf.ToolEnv(tools=[look], dataset=rows, rubric=rubric)
        if tools
        else vf.SingleTurnEnv(dataset=rows, rubric=rubric)
    )
    client = ClientConfig(api_base_url=url, api_key_var="SESSION_KEY")
    inputs: Any = [{"prompt": [{"role": "user", "content": WHERE if tools else HELLO}], "example_id": 0, "answer": ""}]
    done = await env.generate(inputs, client=client, model="m", sampling_args={"max_tokens": 100})
    (output,) = done["outputs"]
    assert not output.get("error"), output["error"]
    last = output["completion"][-1]
    return str(last["content"] if isinstance(last, dict) else last.content)


if __name__ == "__main__":
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    play = globals()[sys.argv[1]]
    for line in sys.stdin:
        try:
            answer = {"final": play(**json.loads(line))}
        except Exception as error:  # noqa: BLE001 - a cell of the table says what it was
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
