"""The agents of examples/curl, examples/number_guess and examples/clients/go train a run: as programs of their own, through the real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_external_episodes import EXTERNAL, trained_ids
from test_gateway_run import ToolReplica, running_gateway, served_gateway
from test_orchestrator_run import DEADLINE_S, make_scene

from sluice.v1 import tokens_pb2

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GO, GO_LIBRARIES = ROOT / ".venv-ecosystem-go/bin/go", ROOT / ".debian-ecosystem-go/usr"


@dataclass
class Reverser(ToolReplica):
    """Reverses every second text; copies the others."""

    def says(self, conversation: tokens_pb2.Conversation) -> tokens_pb2.ChatMessage:
        text = conversation.messages[0].content
        return tokens_pb2.ChatMessage(content=text[::-1] if len(self.sampled) % 2 else text)


@dataclass
class Guesser(ToolReplica):
    """Guesses any number of the range."""

    def says(self, conversation: tokens_pb2.Conversation) -> tokens_pb2.ChatMessage:
        low, high = conversation.messages[0].content.split("-")
        return tokens_pb2.ChatMessage(content=str(random.randint(int(low), int(high))))


@contextlib.asynccontextmanager
async def program(*argv: str, directory: Path = ROOT, **environment: str):
    """A program that runs beside the block, and its children; all are ended with the block."""
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=directory, env={**os.environ, **environment}, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def rewards(run_dir: Path) -> list[float]:
    rows = [line for file in run_dir.glob("trajectories/step_*.jsonl") for line in file.read_text().splitlines()]
    return [json.loads(row)["reward"] for row in rows]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_a_shell_script_with_curl_trains_a_run(tmp_path) -> None:
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [Reverser()])
        running = scene.start(**EXTERNAL)
        url = await stack.enter_async_context(running_gateway(scene))
        agents = f"yes {url} | xargs -n 1 -P 4 sh examples/curl/agent.sh"
        await stack.enter_async_context(program("sh", "-c", agents))
        await running
    assert {round(each, 3) for each in rewards(scene.run_dir)} == {1.0, 0.333}, (
        "abc has its b in place, cba all letters"
    )
    assert set(trained_ids(scene).values()) == {1}


@pytest.mark.ecosystem
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
async def test_an_agent_in_typescript_trains_a_run_and_ends_with_it(tmp_path) -> None:
    example = EXAMPLES / "number_guess"
    async with asyncio.timeout(600), program("npm", "ci", "--no-audit", "--no-fund", directory=example) as installing:
        assert await installing.wait() == 0
        async with program("npm", "run", "build", directory=example) as building:
            assert await building.wait() == 0
    await plays_the_guessing_game(tmp_path, "node", "agent.js", directory=example)


@pytest.mark.ecosystem
@pytest.mark.soak  # its compiler builds gRPC first, a minute of CPU; in `make test-ecosystem` the agent in TypeScript plays
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not (GO.exists() and GO_LIBRARIES.exists()),
    reason="Go and gRPC for Go are not here: run `make install-ecosystem`, which needs apt",
)
async def test_an_agent_in_go_trains_a_run_and_ends_with_it(tmp_path) -> None:
    folder = tmp_path / "go/src/sluice-agent"
    shutil.copytree(EXAMPLES / "clients/go", folder)
    go = {
        "GO111MODULE": "off",  # the libraries are Debian's, not those of a module proxy
        "GOPATH": f"{tmp_path}/go:{GO_LIBRARIES}/share/gocode",
        "GOCACHE": str(GO_LIBRARIES.parent / "cache"),  # the libraries are compiled once
        "PATH": f"{GO_LIBRARIES}/bin:{os.environ['PATH']}",
        "PROTOC": f"{sys.executable} -m grpc_tools.protoc",
    }
    build = f"sh generate.sh {ROOT}/proto && {GO} vet . && {GO} build -o agent ."
    async with asyncio.timeout(1000), program("sh", "-c", build, directory=folder, **go) as building:
        assert await building.wait() == 0
    await plays_the_guessing_game(tmp_path, str(folder / "agent"), directory=folder)


async def plays_the_guessing_game(outputs: Path, *argv: str, directory: Path) -> None:
    """Start a run of number_guess, and a program in a directory that plays it until the run ends."""
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(outputs, stack, [Guesser()])
        game = f"{EXAMPLES}/number_guess/env.py:NumberGuess"
        running = scene.start(**EXTERNAL, environment=game, batch_size=4, group_size=4)
        target, _ = await stack.enter_async_context(served_gateway(scene))
        agent = await stack.enter_async_context(program(*argv, target, "test", directory=directory))
        await running
        assert await agent.wait() == 0
    given = rewards(scene.run_dir)
    assert len(given) == 2 * 4 * 4
    assert len(set(given)) > 1
    assert len(scene.replicas[0].calls) > 2 * len(given), "games have several turns"
    assert set(trained_ids(scene).values()) == {1}
