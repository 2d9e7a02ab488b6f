"""A service whose peer never comes says which one is missing, where, why, and what to do."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from held_ports import held_ports
from simulated_clock import LIMIT_S, SimulatedClock

from sluice.config import CommonConfig, MissingPeerError, SecurityConfig, ServerConfig
from sluice.doctor import peers
from sluice.peers import missing_peers_reported
from sluice.rpc import RpcServer
from sluice.supervise.restart_policy import EXIT_MISSING_PEER

LOADS_S = 300.0
"""Seconds in which a service must have reported that is a process; the machine may be busy."""

COMMON = CommonConfig(peers_start_s=30.0)


@pytest.fixture(autouse=True)
def answers_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ANSWER_S", LIMIT_S)


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nothing listens."""
    with held_ports(1) as (port,):
        yield f"127.0.0.1:{port}"


def server(name: str = "weightsync") -> RpcServer:
    return RpcServer(name, ServerConfig(), SecurityConfig())


async def reports(logged: list[Any], clock: SimulatedClock, count: int = 1) -> list[Any]:
    """Let time pass until one peer was reported so many times."""

    def found() -> list[Any]:
        return [each for each in logged if "peer" in each]

    while len(found()) < count:
        await clock.until(lambda: clock.waits == 1)  # for each peer that does not serve
        before = len(found())
        await clock.advance(COMMON.peers_start_s)
        await clock.until(lambda before=before: len(found()) > before)
    return found()


async def test_an_address_at_which_nothing_listens_is_reported_again_and_again(nobody: str) -> None:
    clock = SimulatedClock()
    with structlog.testing.capture_logs() as logged:
        async with missing_peers_reported({"weightsync": nobody}, COMMON, server(), clock):
            one, two, *_ = await reports(logged, clock, 2)
    assert (one["log_level"], one["peer"], one["address"]) == ("error", "weightsync", nobody)
    assert one["reason"] == "nothing listens there"
    assert "`sluice weightsync` runs there" in one["remedy"]
    assert (one["waited_s"], two["waited_s"]) == (30.0, 60.0)


async def test_a_name_that_does_not_resolve_is_the_reason() -> None:
    clock = SimulatedClock()
    with structlog.testing.capture_logs() as logged:
        async with missing_peers_reported({"trainer": "no-such-host.invalid:7102"}, COMMON, server(), clock):
            assert "cannot be resolved" in (await reports(logged, clock))[0]["reason"]


async def test_a_peer_that_still_loads_is_the_reason_and_one_that_serves_is_not_reported() -> None:
    clock = SimulatedClock()
    loading, serving = server("trainer"), server("weightsync")
    async with AsyncExitStack() as stack:
        for each in (loading, serving):
            await each.start()
            stack.push_async_callback(each.stop, 0)
        loading.set_serving(False)
        needed = {"trainer": loading.target, "weightsync": serving.target}
        with structlog.testing.capture_logs() as logged:
            async with missing_peers_reported(needed, COMMON, server(), clock):
                found = await reports(logged, clock, 3)
    assert {each["peer"] for each in found} == {"trainer"}
    assert "does not serve yet" in found[0]["reason"]


async def test_a_service_whose_peer_never_serves_drains_and_ends_with_the_remedy(nobody: str) -> None:
    clock, waiting = SimulatedClock(), server()
    common = COMMON.model_copy(update={"peers_give_up_s": 70.0})
    await waiting.start()

    async def serve() -> None:
        async with missing_peers_reported({"weightsync": nobody}, common, waiting, clock):
            await waiting.serve_until_signal()

    with structlog.testing.capture_logs() as logged:
        serving = asyncio.create_task(serve())
        assert len(await reports(logged, clock, 2)) == 2
        assert not waiting.drain.begun.is_set(), "60 of 70 seconds"
        await clock.until(lambda: clock.waits == 1)
        await clock.advance(10.0)
        why = f"weightsync at {nobody} has not served for 70 s (peers_give_up_s): nothing listens there; see that"
        with pytest.raises(MissingPeerError, match=re.escape(why)):
            await asyncio.wait_for(serving, LIMIT_S)


@pytest.mark.parametrize(("give_up_s", "gives_up"), [(0.0, True), (70.0, False)])
async def test_a_service_may_wait_for_ever(nobody: str, give_up_s: float, gives_up: bool) -> None:
    clock, waiting = SimulatedClock(), server()
    common = COMMON.model_copy(update={"peers_give_up_s": give_up_s})
    with structlog.testing.capture_logs() as logged:
        async with missing_peers_reported({"weightsync": nobody}, common, waiting, clock, gives_up=gives_up):
            assert len(await reports(logged, clock, 4)) == 4
    assert not waiting.drain.begun.is_set()


async def test_a_peer_that_has_served_once_may_go_away_for_ever() -> None:
    clock, waiting, peer = SimulatedClock(), server(), server()
    await peer.start()
    async with missing_peers_reported({"weightsync": peer.target}, COMMON, waiting, clock):
        await clock.until(lambda: not waiting.readiness.waits_for())
        await peer.stop(0)
        await clock.advance(2 * COMMON.peers_give_up_s)
        assert not waiting.drain.begun.is_set()


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


async def reported(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Return the first report of a missing peer in a service's output."""
    assert process.stdout is not None
    async with asyncio.timeout(LOADS_S):
        while line := await process.stdout.readline():
            if line.startswith(b"{") and "peer" in (event := json.loads(line)):
                return dict(event)
    raise AssertionError("the service ended without a report")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("words", "peer"),
    [
        (("gateway", "--server.http-port", "0"), "orchestrator"),
        (("weightsync", "--upstream", "{target}"), "weightsync"),
    ],
)
async def test_a_service_on_its_own_reports_the_peer_that_never_comes(
    words: tuple[str, ...], peer: str, tmp_path: Path, nobody: str
) -> None:
    flags = [each.format(target=nobody) for each in words]
    async with program(tmp_path, *flags, "--peers.orchestrator", nobody) as process:
        event = await reported(process)
    assert (event["level"], event["peer"], event["address"]) == ("error", peer, nobody)
    assert event["reason"] == "nothing listens there"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_service_on_its_own_ends_with_a_code_that_a_restart_may_cure(tmp_path: Path, nobody: str) -> None:
    words = ("weightsync", "--upstream", nobody, "--peers-give-up-s", "1")
    async with program(tmp_path, *words) as process, asyncio.timeout(LOADS_S):
        output, _ = await process.communicate()
    assert process.returncode == EXIT_MISSING_PEER
    last = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")][-1]
    assert last["event"] == "gave up"
    assert f"weightsync at {nobody} has not served for" in last["reason"]


@pytest.mark.slow
@pytest.mark.ecosystem
@pytest.mark.timeout(600)
async def test_services_that_load_a_model_report_the_peer_that_never_comes(tmp_path: Path, nobody: str) -> None:
    from sluice.cli.init_model import ModelShape, init_model

    model = tmp_path / "model"
    init_model(model, ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48), seed=3)
    common = ("--model", model, "--peers.weightsync", nobody, "--peers.trainer", nobody)
    environment = f"{Path(__file__).parents[2]}/examples/reverse_text/env.py:ReverseText"
    services = {
        "trainer": ("trainer", *common),
        "rollout": ("rollout", *common, "--engine", "transformers", "--server.http-port", "none"),
        "orchestrator": ("orchestrator", *common, "--environment", environment),
    }

    async def missing(name: str) -> str:
        async with program(tmp_path / name, *services[name]) as process:
            return str((await reported(process))["peer"])

    found = await asyncio.gather(*(missing(name) for name in services))
    assert dict(zip(services, found, strict=True)) == {
        "trainer": "weightsync",
        "rollout": "weightsync",
        "orchestrator": "trainer",
    }


@pytest.mark.slow
@pytest.mark.ecosystem
@pytest.mark.timeout(600)
async def test_an_orchestrator_without_a_trainer_ends_at_its_deadline_and_names_it(tmp_path: Path, nobody: str) -> None:
    environment = f"{Path(__file__).parents[2]}/examples/reverse_text/env.py:ReverseText"
    limits = ("--peers.trainer", nobody, "--deadlines.start-s", "10", "--peers-start-s", "3")
    async with program(tmp_path, "orchestrator", "--environment", environment, *limits) as process:
        async with asyncio.timeout(LOADS_S):
            output, _ = await process.communicate()
    assert process.returncode == 3  # it gave up: a restart would wait for the same trainer
    events = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    assert f"the trainer at {nobody} cannot be reached within 10 s" in events[-1]["reason"]
