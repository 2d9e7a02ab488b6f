"""Agents of unmodified libraries through a gateway: each turn continues the tokens of the one before it.

The libraries live in an environment of their own: the interpreter named by SLUICE_ECOSYSTEM_PYTHON, or one in `.venv-ecosystem*`, or this one.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway_svc.config import CaptureConfig
from sluice.rpc import SluiceError

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.ecosystem, pytest.mark.slow]

CLIENTS = Path(__file__).with_name("ecosystem_clients.py")
ROOT = Path(__file__).parents[3]

AGENTS = {
    "anthropic_whole": ("anthropic",),
    "anthropic_streamed": ("anthropic",),
    "agents_responses": ("agents",),
    "agents_responses_streamed": ("agents",),
    "agents_chat": ("agents",),
    "agents_chat_streamed": ("agents",),
    "langgraph_openai": ("langgraph", "langchain_openai"),
    "langgraph_openai_responses": ("langgraph", "langchain_openai"),
    "langgraph_anthropic": ("langgraph", "langchain_anthropic"),
    "litellm_openai": ("litellm",),
    "litellm_anthropic": ("litellm",),
}
"""The modules that each agent needs."""


@functools.cache
def interpreter(modules: tuple[str, ...]) -> str | None:
    """An interpreter that has all of these modules."""
    given = os.environ.get("SLUICE_ECOSYSTEM_PYTHON")
    found = sorted(ROOT.glob(".venv-ecosystem*/bin/python"))  # some of these libraries do not fit beside each other
    candidates = [given] if given else [*map(str, found), sys.executable]
    program = "import importlib.util as u, sys; sys.exit(not all(u.find_spec(name) for name in sys.argv[1:]))"
    for each in candidates:
        if Path(each).exists() and subprocess.run([each, "-c", program, *modules], check=False).returncode == 0:
            return each
    return None


async def run_agent(name: str, gateway: Any) -> str:
    """Run an agent to its end; return what it says last."""
    python = interpreter(AGENTS[name])
    if python is None:
        pytest.skip(f"{' and '.join(AGENTS[name])} not installed: `make test-ecosystem` installs them")
    process = await asyncio.create_subprocess_exec(
        python,
        str(CLIENTS),
        name,
        gateway.url,
        gateway.session.key,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(120):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-4000:]
    return str(json.loads(out.splitlines()[-1])["final"])


def check_turns(gateway: Any) -> None:
    """The two turns are one branch: the second prompt begins with all tokens of the first turn."""
    first, second = gateway.session.generations.values()
    assert second.prompt[: len(first.prompt + first.sampled)] == first.prompt + first.sampled


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_with_a_tool_is_one_branch(gateway, agent):
    assert await run_agent(agent, gateway) == "It said a cat."
    check_turns(gateway)


@pytest.mark.parametrize(
    "agent", ["anthropic_whole", "anthropic_streamed", "agents_responses_streamed", "agents_chat_streamed"]
)
async def test_an_agent_waits_while_no_replica_serves(another_gateway, agent):
    async with another_gateway(capture=CaptureConfig.model_validate({"deadlines": {"keepalive_s": 0.1}})) as gateway:
        gateway.sessions.serving.clear()
        running = asyncio.create_task(run_agent(agent, gateway))
        async with asyncio.timeout(60):
            while not gateway.session.requests and not running.done():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.05)
        await asyncio.sleep(2.0)
        gateway.sessions.serving.set()
        assert await running == "It said a cat."
        check_turns(gateway)


@pytest.mark.parametrize(
    "agent", ["anthropic_whole", "agents_responses", "agents_chat", "langgraph_openai", "litellm_openai"]
)
async def test_an_agent_repeats_what_failed(gateway, agent):
    gateway.sessions.failures = [SluiceError.unavailable("NO_REPLICA", "no replica serves", 0.1)]
    assert await run_agent(agent, gateway) == "It said a cat."
    assert not gateway.sessions.failures
    check_turns(gateway)
