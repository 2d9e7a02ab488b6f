"""An agent that shops through Anthropic's Messages: `python agent_anthropic.py [--gateway http://127.0.0.1:7115]`.

Nothing of the SDK is changed. It gets the base URL and the key of a session.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from anthropic import AsyncAnthropic, BadRequestError, DefaultAsyncHttpxClient
from sessions import Played, Session, play_all

MAX_TURNS = 6
MAX_TOKENS = 64

PRICE: dict[str, Any] = {
    "name": "price",
    "description": "Price of an item.",
    "input_schema": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
}


async def shop(client: AsyncAnthropic, question: str, prices: dict[str, int]) -> Played:
    """Ask the policy, and answer its calls until it makes none."""
    messages: list[Any] = [{"role": "user", "content": question}]
    calls = 0
    for _ in range(MAX_TURNS):
        reply = await client.messages.create(model="policy", max_tokens=MAX_TOKENS, messages=messages, tools=[PRICE])
        asked = [block for block in reply.content if block.type == "tool_use"]
        if not asked:
            return Played("".join(block.text for block in reply.content if block.type == "text"), calls)
        calls += len(asked)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": looked_up(block.name, block.input, prices)}
            for block in asked
        ]
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    return Played("", calls)


def looked_up(tool: str, given: dict[str, Any], prices: dict[str, int]) -> str:
    """Return the result of a call, as a text that also says what was wrong with it."""
    if tool != "price":
        return "no such tool"
    return str(prices.get(str(given.get("item")), "unknown"))


async def main() -> None:
    """Play until the run has ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gateway = os.environ.get("SLUICE_GATEWAY_URL", "http://127.0.0.1:7115")
    parser.add_argument("--gateway", default=gateway, help="URL of the gateway; `sluice eval` names its own")
    parser.add_argument("--at-a-time", type=int, default=64, help="episodes under way")
    options = parser.parse_args()
    async with DefaultAsyncHttpxClient() as http:

        async def play(session: Session) -> Played:
            client = AsyncAnthropic(base_url=session.anthropic_base_url, api_key=session.key, http_client=http)
            try:
                return await shop(client, session.question, session.prices)
            except BadRequestError:  # no room left for another turn
                return Played("", 0)

        await play_all(http, options.gateway, play, options.at_a_time)


if __name__ == "__main__":
    asyncio.run(main())
