"""The packages for agents, built and installed as a stranger does: each plays the episodes of a run through the real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from built_packages import build_wheels, client_environment, run
from test_example_agents import Reverser
from test_external_episodes import EXTERNAL, trained_ids
from test_gateway_run import served_gateway
from test_orchestrator_run import DEADLINE_S, make_scene

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
AGENTS = Path(__file__).parent / "sdk"

EPISODES = 2 * 2 * 2
"""Steps, groups a step, episodes a group."""


async def played(directory: Path, *argv: str | Path, url: bool = False) -> dict:
    """Start a run with external episodes and a program that gets the gateway's address; return what the program printed."""
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(directory, stack, [Reverser()])
        running = scene.start(**EXTERNAL)
        target, _ = await stack.enter_async_context(served_gateway(scene))
        agent = await asyncio.create_subprocess_exec(
            *argv, f"{'http://' * url}{target}", cwd=directory, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            printed, _ = await agent.communicate()
            assert agent.returncode == 0, printed
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
        await running
    assert len(trained_ids(scene)) == EPISODES * 2 * 3, "two turns of three tokens"
    assert set(trained_ids(scene).values()) == {1}
    return dict(json.loads(printed))


async def test_the_client_wheel_needs_grpcio_and_protobuf_alone(tmp_path: Path) -> None:
    python = client_environment(build_wheels(tmp_path), tmp_path / "client")
    found = await played(tmp_path, python, AGENTS / "agent.py")
    assert found["installed"] == [
        "googleapis-common-protos",
        "grpcio",
        "protobuf",
        "sluice-client",
        "typing_extensions",
    ]
    assert found["episodes"] == EPISODES


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
async def test_the_npm_package_compiles_strictly_and_plays_by_unary_calls_and_streams(tmp_path: Path) -> None:
    run("make", "npm-package")
    (package,) = (ROOT / "dist").glob("sluice-proto-*.tgz")
    for name in ("package.json", "package-lock.json", "tsconfig.json", "agent.ts"):
        shutil.copy(AGENTS / name, tmp_path)
    run("npm", "install", "--no-audit", "--no-fund", "--loglevel=error", package, cwd=tmp_path)
    run(tmp_path / "node_modules/.bin/tsc", cwd=tmp_path)
    seen = await played(tmp_path, "node", "agent.js", str(EPISODES), url=True)
    assert seen["episodes"] == EPISODES
    assert seen["texts"] == ["cba"] * EPISODES, "each first turn came over a stream"
    assert seen["tokens"] == 3 * EPISODES
    assert (seen["unknown"], seen["code"]) == ("UNKNOWN_EPISODE", "NotFound")
