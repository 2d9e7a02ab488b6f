"""Agents of unmodified libraries through a gateway: each turn continues the tokens of the one before it.

The libraries live in environments of their own: the interpreter named by SLUICE_ECOSYSTEM_PYTHON, or one in `.venv-ecosystem*`, or this
one; packages for Node.js in the directory named by SLUICE_ECOSYSTEM_NODE, or `.node-ecosystem`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
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


NODE = Path(os.environ.get("SLUICE_ECOSYSTEM_NODE", ROOT / ".node-ecosystem")) / "node_modules"
NODE_AGENTS = {"openai_chat": "openai", "openai_responses": "openai", "anthropic": "@anthropic-ai/sdk"}
"""The package that each agent needs."""

CODEX_PROVIDER = 'model_providers.gateway={name="gateway",base_url="URL/v1",env_key="KEY",wire_api="responses"}'
CLIS = {
    "claude": ["-p", "Where is it?", "--model", "any"],
    "codex": [
        "exec",
        "--skip-git-repo-check",
        "-c",
        'model_provider="gateway"',
        "-c",
        CODEX_PROVIDER,
        "-m",
        "any",
        "Where is it?",
    ],
}
"""Coding agents of the terminal, and how they are told to ask."""


async def output_of(command: list[str], **settings: Any) -> str:
    """Run a program to its end; return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        **settings,
    )
    try:
        async with asyncio.timeout(120):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out + errors).decode()[-4000:]
    return out.decode()


async def run_agent(name: str, gateway: Any) -> str:
    """Run an agent in Python to its end; return what it says last."""
    python = interpreter(AGENTS[name])
    if python is None:
        pytest.skip(f"{' and '.join(AGENTS[name])} not installed: `make install-ecosystem` installs them")
    out = await output_of([python, str(CLIENTS), name, gateway.url, gateway.session.key])
    return str(json.loads(out.splitlines()[-1])["final"])


async def run_node_agent(name: str, gateway: Any, directory: Path) -> str:
    """Run an agent in JavaScript to its end; return what it says last."""
    package = NODE_AGENTS[name.removesuffix("_streamed")]
    if shutil.which("node") is None or not (NODE / package).is_dir():
        pytest.skip(
            f"Node.js and its package {package} are not installed: `make install-ecosystem` installs the package"
        )
    program = directory / CLIENTS.with_suffix(".mjs").name  # packages are found beside the program
    program.write_text(CLIENTS.with_suffix(".mjs").read_text())
    (directory / "node_modules").symlink_to(NODE)
    out = await output_of(["node", str(program), name, gateway.url, gateway.session.key])
    return str(json.loads(out.splitlines()[-1])["final"])


async def run_cli(name: str, gateway: Any, home: Path) -> str:
    """Run a coding agent of the terminal in an empty home, with nothing but the gateway and its key; return what it prints."""
    program = NODE / ".bin" / name
    if not program.exists():
        pytest.skip(f"{name} is not installed: `make install-ecosystem` installs it")
    key = gateway.session.key
    (home / ".codex").mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CI": "1", "KEY": key}
    environment |= {"ANTHROPIC_BASE_URL": gateway.url, "ANTHROPIC_API_KEY": key}
    environment["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    arguments = [argument.replace("URL", gateway.url) for argument in CLIS[name]]
    return await output_of([str(program), *arguments], env=environment, cwd=home)


def check_turns(gateway: Any) -> None:
    """The two turns are one branch: the second prompt begins with all tokens of the first turn."""
    first, second = gateway.session.generations.values()
    assert second.prompt[: len(first.prompt + first.sampled)] == first.prompt + first.sampled


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_with_a_tool_is_one_branch(gateway, agent):
    assert await run_agent(agent, gateway) == "It said a cat."
    check_turns(gateway)


@pytest.mark.parametrize("streamed", ["", "_streamed"])
@pytest.mark.parametrize("agent", NODE_AGENTS)
async def test_an_agent_in_javascript_is_one_branch(gateway, tmp_path, agent, streamed):
    assert await run_node_agent(agent + streamed, gateway, tmp_path) == "It said a cat."
    check_turns(gateway)


@pytest.mark.parametrize("fault", ["", "fails once", "waits"])
@pytest.mark.parametrize("cli", CLIS)
async def test_a_coding_cli_is_one_branch(gateway, tmp_path, cli, fault):
    """Its first tool is called with arguments that it refuses; the model says what the error was."""
    if fault == "fails once":
        gateway.sessions.failures = [SluiceError.unavailable("NO_REPLICA", "no replica serves", 0.1)]
    if fault == "waits":
        gateway.sessions.serving.clear()
        asyncio.get_running_loop().call_later(8, gateway.sessions.serving.set)
    assert "It said" in await run_cli(cli, gateway, tmp_path)
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
