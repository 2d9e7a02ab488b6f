"""`sluice rollout` with vLLM as a process of its own: versions arrive in flight, a killed engine comes back, a drain ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import load_file
from small_models import CONTEXT, greedy, save_model
from weightsync_stack import RUN, Stack, running_stack

from benchmarks.children import service
from sluice.client import RolloutClient
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2, tokens_pb2
from sluice.versions import BASE, Version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [5, 9, 17, 33]
GREEDY = tokens_pb2.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = tokens_pb2.SamplingParams(max_tokens=CONTEXT - 32, ignore_eos=True)
DEADLINE_S = 180.0

SETTINGS = """
run = "{run}"
model = "{model}"
[peers]
weightsync = "{weightsync}"
[rollout]
engine = "vllm"
threads = 1
stage_dir = "{stage}"
kv_cache_bytes = 33554432
[rollout.engine_args]
max_model_len = {context}
[rollout.server]
host = "{target}"
http_port = 0
"""


@dataclass
class Running:
    """The process, its weight service, and a client."""

    process: psutil.Process
    sync: Stack
    client: RolloutClient
    target: str

    async def publish(self, model: Path, number: int) -> Version:
        version = Version(1, number)
        await self.sync.push(version, load_file(model / "model.safetensors"), deadline_s=DEADLINE_S)
        return version

    async def until(self, state: rollout_pb2.ReplicaState.ValueType, version: Version, restarts: int = 0) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                status = await self.client.status()
                served = Version.from_proto(status.policy_version)
                if (status.state, served, status.engine_restarts) == (state, version, restarts):
                    return
                await asyncio.sleep(0.05)

    async def health(self) -> int:
        async with grpc.aio.insecure_channel(self.target) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        return answer.status


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    model = save_model(tmp_path / "base", 1)
    target = f"unix:{tmp_path}/socket"
    async with running_stack(tmp_path / "outputs", model=str(model)) as sync:
        settings = tmp_path / "rollout.toml"
        settings.write_text(
            SETTINGS.format(
                run=RUN, model=model, weightsync=sync.target, stage=tmp_path / "stage", context=CONTEXT, target=target
            )
        )
        async with (
            service(
                "rollout", "@", str(settings), health=target, log=tmp_path / "rollout.log", start_s=DEADLINE_S
            ) as child,
            RolloutClient(target) as client,
        ):
            yield Running(psutil.Process(child.pid), sync, client, target)


async def test_versions_arrive_in_flight_and_a_drain_ends_all_processes(running, tmp_path):
    second = save_model(tmp_path / "second", 2)
    spans = await _spans_of_a_request_with_an_update_on_its_way(running, second)
    assert [version for _, version in spans] == [BASE, Version(1, 1)]
    answer = await running.client.generate(PROMPT, GREEDY)
    assert list(answer.samples[0].token_ids) == greedy(second, PROMPT, 12)

    third = save_model(tmp_path / "third", 3)
    await running.until(rollout_pb2.REPLICA_STATE_SERVING, await running.publish(third, 2))
    answer = await running.client.generate(PROMPT, GREEDY)
    assert list(answer.samples[0].token_ids) == greedy(third, PROMPT, 12)
    await _a_drain_ends_all_processes(running)


@pytest.mark.soak
async def test_a_killed_engine_comes_back(running, tmp_path):
    """In `make test`, test_adapter_process.py does the same to an engine with an adapter."""
    second = save_model(tmp_path / "second", 2)
    await running.until(rollout_pb2.REPLICA_STATE_SERVING, await running.publish(second, 1))
    waiting = asyncio.ensure_future(running.client.generate(PROMPT, LONG, n=4))
    async with asyncio.timeout(DEADLINE_S):
        while (await running.client.status()).running < 4:  # noqa: ASYNC110 - status is meant to be polled
            await asyncio.sleep(0.01)
    engine = _engine_of(running.process)
    engine.kill()
    with pytest.raises(SluiceError) as refusal:
        await waiting
    assert refusal.value.code is grpc.StatusCode.UNAVAILABLE
    await running.until(rollout_pb2.REPLICA_STATE_SERVING, Version(1, 1), restarts=1)
    assert await running.health() == health_pb2.HealthCheckResponse.SERVING
    answer = await running.client.generate(PROMPT, GREEDY)
    assert list(answer.samples[0].token_ids) == greedy(second, PROMPT, 12)

    # The new engine follows as the old one did.
    third = save_model(tmp_path / "third", 3)
    await running.until(rollout_pb2.REPLICA_STATE_SERVING, await running.publish(third, 2), restarts=1)
    answer = await running.client.generate(PROMPT, GREEDY)
    assert list(answer.samples[0].token_ids) == greedy(third, PROMPT, 12)
    await _a_drain_ends_all_processes(running)


async def _a_drain_ends_all_processes(running: Running) -> None:
    family = running.process.children(recursive=True)
    await _a_drain_hands_requests_over(running)
    _, alive = await asyncio.to_thread(psutil.wait_procs, [*family], timeout=30)
    assert not alive


async def _a_drain_hands_requests_over(running: Running) -> None:
    """What does not end in time ends with its tokens so far, on a stream and as a whole answer."""
    whole = asyncio.ensure_future(running.client.generate(PROMPT, LONG, n=2))
    stream = running.client.stream(PROMPT, LONG, n=2)
    messages = []
    async for message in stream:
        messages.append(message)
        if message.chunk.deltas and (await running.client.status()).running == 4:
            break
    answer = await running.client.drain(0.0)
    assert answer.samples_left == 4
    messages += [message async for message in stream]
    deltas = [delta.tokens for message in messages for delta in message.chunk.deltas]
    for sample in (await whole).samples:
        streamed = [tokens for tokens in deltas if tokens.index == sample.index]
        assert sample.finish_reason == streamed[-1].finish_reason == tokens_pb2.FINISH_REASON_ABORT
        for count in (len(sample.token_ids), sum(len(tokens.token_ids) for tokens in streamed)):
            assert 0 < count < LONG.max_tokens


async def _spans_of_a_request_with_an_update_on_its_way(running: Running, second: Path) -> list[tuple[int, Version]]:
    """Publish a version during a request. Return the version of each span of its tokens. The model is fast, so pause the request meanwhile."""
    spans: list[tuple[int, Version]] = []
    pause = rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_KEEP, owner="test")
    pause.ttl.FromSeconds(3600)
    publishing = False
    while not publishing:  # again, if the request ends before the pause
        spans, paused = [], False
        async for message in running.client.stream(PROMPT, LONG, run=f"runs/{RUN}"):
            if not message.chunk.deltas:
                continue
            if not paused:
                paused = True
                await running.client._admin.Pause(pause, timeout=DEADLINE_S)
                status = await running.client.status()
                publishing = status.running + status.queued > 0
                if publishing:
                    await running.until(rollout_pb2.REPLICA_STATE_PAUSED, await running.publish(second, 1))
                await running.client._admin.Resume(rollout_pb2.ResumeRequest(owner="test"), timeout=DEADLINE_S)
            for span in message.chunk.deltas[0].tokens.version_spans:
                version = Version.from_proto(span.policy_version)
                if not spans or spans[-1][1] != version:
                    spans.append((span.start, version))
    return spans


def _engine_of(process: psutil.Process) -> psutil.Process:
    """vLLM's engine: the child that uses most memory."""
    return max(process.children(recursive=True), key=lambda child: child.memory_info().rss)
