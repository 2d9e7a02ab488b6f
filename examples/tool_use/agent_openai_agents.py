"""An agent of openai-agents that shops: `python agent_openai_agents.py [--gateway http://127.0.0.1:7115]`.

Nothing of the framework is changed. Its model gets the base URL and the key of a session, and speaks Responses.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import dataclass

from agents import Agent, OpenAIResponsesModel, RunContextWrapper, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
from sessions import Played, Session, play_all

MAX_TURNS = 6


@dataclass
class Shop:
    """What the tool knows.

    Attributes:
        prices: Price of each item.
        calls: How often it was asked.
    """

    prices: dict[str, int]
    calls: int = 0


@function_tool
def price(shop: RunContextWrapper[Shop], item: str) -> str:
    """Price of an item."""
    shop.context.calls += 1
    return str(shop.context.prices.get(item, "unknown"))


async def main() -> None:
    """Play until the run has ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gateway = os.environ.get("SLUICE_GATEWAY_URL", "http://127.0.0.1:7115")
    parser.add_argument("--gateway", default=gateway, help="URL of the gateway; `sluice eval` names its own")
    parser.add_argument("--at-a-time", type=int, default=64, help="episodes under way")
    options = parser.parse_args()
    set_tracing_disabled(True)
    async with DefaultAsyncHttpxClient() as http:

        async def play(session: Session) -> Played:
            client = AsyncOpenAI(base_url=session.openai_base_url, api_key=session.key, http_client=http)
            shopper = Agent[Shop](name="shopper", tools=[price], model=OpenAIResponsesModel("policy", client))
            shop = Shop(session.prices)
            try:
                result = await Runner.run(shopper, session.question, context=shop, max_turns=MAX_TURNS)
            except (AgentsException, BadRequestError):  # no such tool, too many turns, a reply without end, no room
                return Played("", shop.calls)
            return Played(str(result.final_output), shop.calls)

        await play_all(http, options.gateway, play, options.at_a_time)


if __name__ == "__main__":
    asyncio.run(main())
