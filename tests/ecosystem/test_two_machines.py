"""From the wheels alone: a quickstart in an empty folder of one machine, and a run whose episodes an agent on another machine plays.

The machines are network namespaces. The agent's machine has nothing of Sluice but `sluice-client`; it reaches the gateway by TLS, with a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from built_packages import build_wheels, client_environment, full_environment
from network_namespaces import Machines, needs_namespaces

sys.path.append(str(Path(__file__).parents[1] / "contract"))

from certificates import Authority

STAGE_S = 600
"""Seconds for the quickstart, and for the run: a minute each on two idle cores."""

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow, pytest.mark.timeout(3 * STAGE_S), needs_namespaces]

AGENT = Path(__file__).parent / "distant_agent.py"
SMALL = ["--engine", "transformers", "--steps", "2", "--sft-steps", "30", "--prompts", "4", "--plain"]
RUN = [
    "--run",
    "two",
    "--orchestrator.max-steps",
    "2",
    "--orchestrator.batch-size",
    "2",
    "--orchestrator.group-size",
    "2",
    "--plain",
    "--model",
    "outputs/quickstart/warm",
    "--gateway.server.host",
]
EPISODES = 2 * 2 * 2


@contextlib.asynccontextmanager
async def started(*argv: str | Path, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program in a folder, its output in `process.stdout`; it and its children end with the block."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLUICE"))}
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def output_of(*argv: str | Path, folder: Path, code: int = 0) -> str:
    """Run a program to its end, which must come with this exit code; return its output."""
    async with started(*argv, folder=folder) as process:
        printed = (await process.communicate())[0].decode()
    assert process.returncode == code, printed[-8000:]
    return printed


async def test_a_quickstart_on_one_machine_and_an_agent_on_another(tmp_path: Path) -> None:
    wheels = build_wheels(tmp_path)
    sluice = full_environment(wheels, tmp_path / "full").with_name("sluice")
    python = client_environment(wheels, tmp_path / "client")
    trains, plays = tmp_path / "trains", tmp_path / "plays"
    for each in (trains, plays):
        each.mkdir()
    with Machines(2) as machines:
        here, there = machines.enter(0), machines.enter(1)
        async with asyncio.timeout(STAGE_S):
            printed = await output_of(*here, sluice, "quickstart", *SMALL, folder=trains)
        assert "outputs/quickstart: 2 steps" in printed
        address = machines.address(0)
        authority = Authority(plays / "authority")
        certificate, key = authority.issue("trains", address=[address, "127.0.0.1"])
        tokens = {name: plays / f"{name}.token" for name in ("agent", "admin")}
        for each in tokens.values():
            each.write_text(secrets.token_hex(32))
        security = {
            "token-file": tokens["agent"],
            "admin-token-file": tokens["admin"],
            "tls-cert": certificate,
            "tls-key": key,
            "tls-ca": authority.path,
        }
        settings = [str(word) for name, file in security.items() for word in (f"--security.{name}", file)]
        asked = (f"{address}:7105", "two", authority.path)
        async with (
            asyncio.timeout(STAGE_S),
            started(*here, sluice, "rl", "@", "examples/curl/rl.toml", *RUN, address, *settings, folder=trains) as run,
        ):
            refused = await output_of(*there, python, AGENT, *asked, folder=plays, code=1)
            assert "UNAUTHENTICATED" in refused
            played = await output_of(*there, python, AGENT, *asked, tokens["agent"], folder=plays)
            said = (await run.communicate())[0].decode()
            assert run.returncode == 0, said[-8000:]
    assert int(played.split()[0]) >= EPISODES
    assert "run two done: 2 steps" in said
    await output_of(sluice, "audit", "two", folder=trains)
