"""A service whose peer never comes says which one is missing, where, why, and what to do."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from sluice.config import CommonConfig, SecurityConfig, ServerConfig
from sluice.peers import missing_peers_reported
from sluice.rpc import RpcServer
from sluice.rpc.server import free_ports

DEADLINE_S = 60.0
LOADS_S = 240.0
"""Seconds in which a service that loads a model must have reported; the machine may be busy."""


def waits(seconds: float = 0.2) -> CommonConfig:
    return CommonConfig(peers_start_s=seconds)


async def reports(logged: list[Any], count: int = 1) -> list[Any]:
    """Wait until so many missing peers were reported."""
    async with asyncio.timeout(DEADLINE_S):
        while len(found := [each for each in logged if "peer" in each]) < count:  # noqa: ASYNC110 - another task logs
            await asyncio.sleep(0.01)
    return found


async def test_an_address_at_which_nothing_listens_is_reported_again_and_again() -> None:
    target = f"127.0.0.1:{free_ports(1)[0]}"
    with structlog.testing.capture_logs() as logged:
        async with missing_peers_reported({"weightsync": target}, waits()):
            one, two, *_ = await reports(logged, 2)
    assert (one["log_level"], one["peer"], one["address"]) == ("error", "weightsync", target)
    assert one["reason"] == "nothing listens there"
    assert "`sluice weightsync` runs there" in one["remedy"]
    assert two["waited_s"] > one["waited_s"] >= 0.2


async def test_a_name_that_does_not_resolve_is_the_reason() -> None:
    with structlog.testing.capture_logs() as logged:
        async with missing_peers_reported({"trainer": "no-such-host.invalid:7102"}, waits()):
            assert "cannot be resolved" in (await reports(logged))[0]["reason"]


async def test_a_peer_that_still_loads_is_the_reason_and_one_that_serves_is_not_reported() -> None:
    loading, serving = (RpcServer(name, ServerConfig(), SecurityConfig()) for name in ("trainer", "weightsync"))
    async with AsyncExitStack() as stack:
        for server in (loading, serving):
            await server.start()
            stack.push_async_callback(server.stop, 0)
        loading.set_serving(False)
        peers = {"trainer": loading.target, "weightsync": serving.target}
        with structlog.testing.capture_logs() as logged:
            async with missing_peers_reported(peers, waits()):
                found = await reports(logged, 3)
    assert {each["peer"] for each in found} == {"trainer"}
    assert "does not serve yet" in found[0]["reason"]


@asynccontextmanager
async def program(directory: Path, *words: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """A real service whose peers never come."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.cli.main", *map(str, words)),
        *("--output-dir", str(directory), "--peers-start-s", "0.5", "--server.port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def reported(process: asyncio.subprocess.Process, within_s: float) -> dict[str, Any]:
    """Return the first report of a missing peer in a service's output."""
    assert process.stdout is not None
    async with asyncio.timeout(within_s):
        while line := await process.stdout.readline():
            if line.startswith(b"{") and "peer" in (event := json.loads(line)):
                return dict(event)
    raise AssertionError("the service ended without a report")


@pytest.mark.parametrize(
    ("words", "peer"),
    [
        (("gateway", "--server.http-port", "0"), "orchestrator"),
        (("weightsync", "--upstream", "{target}"), "weightsync"),
    ],
)
async def test_a_service_on_its_own_reports_the_peer_that_never_comes(
    words: tuple[str, ...], peer: str, tmp_path: Path
) -> None:
    target = f"127.0.0.1:{free_ports(1)[0]}"
    flags = [each.format(target=target) for each in words]
    async with program(tmp_path, *flags, "--peers.orchestrator", target) as process:
        event = await reported(process, DEADLINE_S)
    assert (event["level"], event["peer"], event["address"]) == ("error", peer, target)
    assert event["reason"] == "nothing listens there"


@pytest.mark.slow
@pytest.mark.ecosystem
@pytest.mark.timeout(600)
async def test_services_that_load_a_model_report_the_peer_that_never_comes(tmp_path: Path) -> None:
    from sluice.cli.init_model import ModelShape, init_model

    model = tmp_path / "model"
    init_model(model, ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48), seed=3)
    target = f"127.0.0.1:{free_ports(1)[0]}"
    common = ("--model", model, "--peers.weightsync", target, "--peers.trainer", target)
    environment = f"{Path(__file__).parents[2]}/examples/reverse_text/env.py:ReverseText"
    services = {
        "trainer": ("trainer", *common),
        "rollout": ("rollout", *common, "--engine", "transformers", "--server.http-port", "none"),
        "orchestrator": ("orchestrator", *common, "--environment", environment),
    }

    async def missing(name: str) -> str:
        async with program(tmp_path / name, *services[name]) as process:
            return str((await reported(process, LOADS_S))["peer"])

    peers = await asyncio.gather(*(missing(name) for name in services))
    assert dict(zip(services, peers, strict=True)) == {
        "trainer": "weightsync",
        "rollout": "weightsync",
        "orchestrator": "trainer",
    }


@pytest.mark.slow
@pytest.mark.ecosystem
async def test_an_orchestrator_without_a_trainer_ends_at_its_deadline_and_names_it(tmp_path: Path) -> None:
    target = f"127.0.0.1:{free_ports(1)[0]}"
    environment = f"{Path(__file__).parents[2]}/examples/reverse_text/env.py:ReverseText"
    limits = ("--peers.trainer", target, "--deadlines.start-s", "10", "--peers-start-s", "3")
    async with program(tmp_path, "orchestrator", "--environment", environment, *limits) as process:
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
    assert process.returncode == 3  # it gave up: a restart would wait for the same trainer
    events = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    assert f"the trainer at {target} cannot be reached within 10 s" in events[-1]["reason"]
