"""`sluice rollout` as a process: both ports serve, and SIGTERM lets what is under way end, on both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from forked_programs import Forked, forked
from rank_programs import RankPrograms
from small_models import save_model

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.v1 import rollout_pb2, rollout_pb2_grpc, tokens_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

DEADLINE_S = 600.0
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
drain_s = {drain_s}
"""


class Replica(NamedTuple):
    """A replica, and the file of its output."""

    process: Forked
    log: Path

    async def listening(self) -> tuple[str, str]:
        """Return the address of gRPC and the URL of HTTP, as the process logs them."""
        while True:
            ended = self.process.returncode is not None
            said = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
            entries = [json.loads(line) for line in said if line.startswith("{") and line.endswith("\n")]
            found = {name: entry[name] for entry in entries for name in ("target", "url") if name in entry}
            if "url" in found:
                return found["target"], found["url"]
            assert not ended, said
            await asyncio.sleep(0.02)


@pytest.fixture
def started(
    tmp_path: Path, rank_programs: RankPrograms
) -> Callable[..., contextlib.AbstractAsyncContextManager[Replica]]:
    @contextlib.asynccontextmanager
    async def run(drain_s: float = 600.0) -> AsyncIterator[Replica]:
        """Run a replica until the block ends."""
        model = save_model(tmp_path / "model", 1)
        settings = tmp_path / "rollout.toml"
        settings.write_text(SETTINGS.format(model=model, drain_s=drain_s))
        log = tmp_path / "rollout.log"
        async with forked(rank_programs, "sluice.cli.main", "rollout", "@", str(settings), log=log) as process:
            yield Replica(process, log)

    return run


async def test_a_replica_that_drains_says_so_refuses_new_work_and_finishes_the_rest(started):
    async with started() as replica, asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=DEADLINE_S) as http:
        target, url = await replica.listening()
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
            replica.process.send_signal(signal.SIGTERM)
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
        assert await replica.process.wait() == 0
        assert "Traceback" not in replica.log.read_text()
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{url}/health")


@pytest.mark.clock(reason="a real replica gets the seconds of its drain, and one more to hand over")
@pytest.mark.parametrize("way", ["command", "signal"])
async def test_what_does_not_end_in_time_is_handed_over_with_its_tokens(started, way):
    async with started(drain_s=2.0) as replica, asyncio.timeout(DEADLINE_S):
        target, _ = await replica.listening()
        async with connect(target, SecurityConfig()) as channel:
            agent, admin = (
                rollout_pb2_grpc.RolloutServiceStub(channel),
                rollout_pb2_grpc.RolloutAdminServiceStub(channel),
            )
            request = rollout_pb2.GenerateRequest(
                token_ids={"ids": [5]}, n=2, sampling={"max_tokens": 400, "ignore_eos": True}
            )
            stream, streamed, whole = await _in_the_middle(agent, admin, request)
            if way == "command":
                command = await drain_command(target, "--grace", "0.3s")
            else:
                replica.process.send_signal(signal.SIGTERM)
            while (message := await stream.read()) is not grpc.aio.EOF:
                streamed.append(message)
            samples = list((await whole).samples)
            for index in range(2):
                parts = [
                    delta.tokens
                    for message in streamed
                    for delta in message.chunk.deltas
                    if delta.tokens.index == index
                ]
                sample = rollout_pb2.GeneratedSample(finish_reason=parts[-1].finish_reason)
                sample.token_ids.extend(token for part in parts for token in part.token_ids)
                samples.append(sample)
            for sample in samples:
                assert sample.finish_reason == tokens_pb2.FINISH_REASON_ABORT
                assert 0 < len(sample.token_ids) < 400
        assert await replica.process.wait() == 0
        assert "Traceback" not in replica.log.read_text()
        if way == "command":
            output, _ = await command.communicate()
            assert command.returncode == 0
            first, *_, last = output.decode().splitlines()
            assert first.endswith("draining, 4 left (4 samples), at most 0 s")
            assert last.endswith("gone")


async def _in_the_middle(
    agent: rollout_pb2_grpc.RolloutServiceStub,
    admin: rollout_pb2_grpc.RolloutAdminServiceStub,
    request: rollout_pb2.GenerateRequest,
) -> tuple[Any, list[rollout_pb2.GenerateStreamResponse], asyncio.Task[rollout_pb2.GenerateResponse]]:
    """Pause between the first and the last tokens of a stream and a whole response; return both, and what the stream gave.

    Where one ends first, because this process was slow, try again.
    """
    status, owner = rollout_pb2.GetStatusRequest(), "test"
    while True:
        stream = agent.GenerateStream(rollout_pb2.GenerateStreamRequest(request=request), timeout=DEADLINE_S)
        await stream.read()
        streamed = [await stream.read()]
        whole = asyncio.create_task(_awaited(agent.Generate(request, timeout=DEADLINE_S)))
        while (began := await admin.GetStatus(status)).running < 4 and not whole.done():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.005)
        # Each step gives a token to each of the four samples.
        while (await admin.GetStatus(status)).generated_tokens < began.generated_tokens + 8 and not whole.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await admin.Pause(
            rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_KEEP, owner=owner, ttl={"seconds": 3600})
        )
        if (await admin.GetStatus(status)).running == 4:
            return stream, streamed, whole
        await admin.Resume(rollout_pb2.ResumeRequest(owner=owner))
        await whole
        while await stream.read() is not grpc.aio.EOF:
            pass


async def drain_command(target: str, *words: str) -> asyncio.subprocess.Process:
    """`sluice drain`."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sluice.cli.main", "drain", target, *words, stdout=asyncio.subprocess.PIPE
    )


async def test_a_drain_of_nobody_says_so(tmp_path):
    command = await drain_command(f"unix:{tmp_path}/nobody")
    output, _ = await command.communicate()
    assert (command.returncode, output) == (1, b"")


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
