"""`sluice rollout` as a process: both ports serve, and SIGTERM lets what is under way end, on both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from small_models import save_model

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.v1 import rollout_pb2, rollout_pb2_grpc

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
DRAINING = rollout_pb2.REPLICA_STATE_DRAINING
SETTINGS = """
run = "test"
model = "{model}"
[rollout]
engine = "transformers"
follow_weights = false
[rollout.server]
port = 0
http_port = 0
drain_s = 60.0
"""


async def listening(process: asyncio.subprocess.Process) -> tuple[str, str]:
    """Return the address of gRPC and the URL of HTTP, as the process logs them."""
    target = ""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        entry = json.loads(line) if line.startswith(b"{") else {}
        target = entry.get("target", target)
        if "url" in entry:
            return target, entry["url"]
    raise AssertionError("the process ended before it served HTTP")


@asynccontextmanager
async def started(directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a replica until the test ends."""
    model = save_model(directory / "model", 1)
    settings = directory / "rollout.toml"
    settings.write_text(SETTINGS.format(model=model))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sluice.cli.main", "rollout", "@", str(settings),
        cwd=directory, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_replica_that_drains_says_so_refuses_new_work_and_finishes_the_rest(tmp_path):
    async with started(tmp_path) as process, asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=DEADLINE_S) as http:
        target, url = await listening(process)
        log = asyncio.create_task(process.stdout.read())
        async with connect(target, SecurityConfig()) as channel:
            agent, admin = (
                rollout_pb2_grpc.RolloutServiceStub(channel),
                rollout_pb2_grpc.RolloutAdminServiceStub(channel),
            )
            request = rollout_pb2.GenerateRequest(
                token_ids={"ids": [5]}, sampling={"max_tokens": 40, "ignore_eos": True}
            )
            stream = {"prompt": [5], "n": 4, "max_tokens": 400, "ignore_eos": True, "stream": True}
            begun = asyncio.Event()
            events = asyncio.create_task(_events(http, f"{url}/v1/completions", stream, begun))
            await begun.wait()
            await admin.Pause(
                rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_KEEP, owner="test", ttl={"seconds": 600})
            )
            under_way = asyncio.create_task(_awaited(agent.Generate(request, timeout=DEADLINE_S)))
            while not (await admin.GetStatus(rollout_pb2.GetStatusRequest())).queued:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            while (status := await admin.GetStatus(rollout_pb2.GetStatusRequest())).state != DRAINING:
                assert status.state == rollout_pb2.REPLICA_STATE_PAUSED
                await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await agent.Generate(request, timeout=DEADLINE_S)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in refused.value.details()
            body = {"prompt": [5], "max_tokens": 4}
            assert (await http.post(f"{url}/v1/completions", json=body)).status_code == 503
            assert (await http.get(f"{url}/health")).status_code == 503
            await admin.Resume(rollout_pb2.ResumeRequest(owner="test"))
            assert len((await under_way).samples[0].token_ids) == 40
            assert (await events)[-2:] == ["data: [DONE]", ""]
        assert await process.wait() == 0
        assert b"Traceback" not in await log
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{url}/health")


async def _awaited(call: Awaitable[rollout_pb2.GenerateResponse]) -> rollout_pb2.GenerateResponse:
    return await call


async def _events(http: httpx.AsyncClient, url: str, body: dict[str, object], begun: asyncio.Event) -> list[str]:
    """Return the lines of a stream."""
    lines = []
    async with http.stream("POST", url, json=body) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            begun.set()
    return lines
