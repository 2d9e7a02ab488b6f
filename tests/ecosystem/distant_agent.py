"""An agent on a machine that has sluice-client alone: python distant_agent.py TARGET RUN CA [TOKEN_FILE]."""

import asyncio
import importlib.util
import sys
from pathlib import Path

from sluice.agent import AgentClient, Episode
from sluice.rpc import ClientSecurity, SluiceError
from sluice.v1.tokens_pb2 import ChatMessage


async def play(episode: Episode) -> float:
    text = episode.data["text"]
    said = (await episode.generate([ChatMessage(role="user", content=text)])).message.content
    return sum(one == other for one, other in zip(said, reversed(text), strict=False)) / max(len(said), len(text))


async def main(target: str, run: str, ca: str, token: str = "") -> None:
    assert not any(importlib.util.find_spec(name) for name in ("torch", "pydantic", "transformers"))
    security = ClientSecurity(tls_ca=Path(ca), token_file=Path(token) if token else None)
    async with AgentClient(target, run, security, patience_s=300) as agent:
        print(await agent.run(play, at_a_time=8), "episodes")


try:
    asyncio.run(main(*sys.argv[1:]))
except SluiceError as error:
    sys.exit(str(error))
