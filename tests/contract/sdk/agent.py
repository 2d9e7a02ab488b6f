"""Plays the episodes of a run with sluice-client alone: python agent.py TARGET. Prints what it loaded and played as JSON."""

import asyncio
import json
import sys
from importlib.metadata import distributions

from sluice.agent import AgentClient, Episode
from sluice.client import OrchestratorClient
from sluice.v1.tokens_pb2 import ChatMessage


async def play(episode: Episode) -> float:
    text = episode.data["text"]
    first = await episode.generate([ChatMessage(role="user", content=text)])
    again = [ChatMessage(role="user", content=text), first.message, ChatMessage(role="user", content="again")]
    await episode.generate(again)
    return float(first.message.content == text)


async def main(target: str) -> None:
    async with AgentClient(target, run="test") as agent:
        played = await agent.run(play, at_a_time=16)
    installed = sorted({each.metadata["Name"] for each in distributions()} - {"pip", "setuptools"})
    print(json.dumps({"episodes": played, "installed": installed, "client": OrchestratorClient.__name__}))


asyncio.run(main(sys.argv[1]))
