"""An adapter's whole way in processes of their own: pushed, committed, followed by vLLM, sampled, retired, continued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from held_ports import held_ports
from small_adapters import recompute_adapted, save_adapter
from small_models import CONTEXT, recompute, save_model

from benchmarks.children import service
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import ReplicaPool
from sluice.v1 import common_pb2, common_pb2_grpc, rollout_pb2, rollout_pb2_grpc, tokens_pb2
from sluice.versions import BASE, Version
from weightsync.publisher import AdapterPublisher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

RUN = "adapters"
PROMPT = [5, 9, 17, 33]
LONG = tokens_pb2.SamplingParams(max_tokens=CONTEXT - 32, ignore_eos=True)
DEADLINE_S = 900.0
"""Limit of what takes vLLM half a minute: to start, and to start again."""
OWNER = "test"
PATIENT = ReplicasConfig(progress_s=DEADLINE_S, paused_s=DEADLINE_S, switch_s=DEADLINE_S, longest_step_s=DEADLINE_S)
SERVING = rollout_pb2.REPLICA_STATE_SERVING

SETTINGS = """
run = "{run}"
model = "{model}"
output_dir = "{outputs}"
max_staleness = 0
[peers]
weightsync = "127.0.0.1:{weightsync_port}"
[weightsync]
min_free_bytes = 0
[weightsync.server]
port = {weightsync_port}
[rollout]
engine = "vllm"
threads = 1
stage_dir = "{stage}"
kv_cache_bytes = 33554432
[rollout.lora]
enabled = true
max_rank = 8
[rollout.deadlines]
start_s = {start_s}
[rollout.engine_args]
max_model_len = {context}
[rollout.server]
port = {port}
http_port = 0
"""


@dataclass
class Running:
    """Both processes, and ways to them."""

    base: Path
    adapters: list[Path]
    target: str
    process: psutil.Process
    publisher: AdapterPublisher
    agent: rollout_pb2_grpc.RolloutServiceAsyncStub
    admin: rollout_pb2_grpc.RolloutAdminServiceAsyncStub
    info: common_pb2_grpc.ServerInfoServiceAsyncStub
    health: health_pb2_grpc.HealthStub

    async def publish(self, number: int) -> None:
        """Publish an adapter and wait until the replica follows."""
        await self.publisher.push_directory(Version(1, number), self.adapters[number], deadline_s=DEADLINE_S)
        await self.until(lambda status: Version.from_proto(status.policy_version) == Version(1, number))

    async def until(self, condition: object) -> rollout_pb2.GetStatusResponse:
        async with asyncio.timeout(DEADLINE_S):
            while not condition(status := await self.status()):  # type: ignore[operator]  # noqa: ASYNC110 - it is asked
                await asyncio.sleep(0.01)
        return status

    async def status(self) -> rollout_pb2.GetStatusResponse:
        return await self.admin.GetStatus(rollout_pb2.GetStatusRequest(), timeout=DEADLINE_S)

    async def paused_amid(
        self, engine: PolicyEngine, request: rollout_pb2.GenerateRequest
    ) -> asyncio.Task[rollout_pb2.GenerateResponse]:
        """Pause the replica while it samples for a request. If it was quicker, the same is done again."""
        while True:
            before = (await self.status()).generated_tokens
            generating = asyncio.create_task(engine.agenerate(request))
            await self.until(lambda status, before=before: status.generated_tokens > before + 8)
            await self.pause()
            if (await self.status()).running:
                return generating
            await self.resume()
            await generating

    async def pause(self) -> None:
        request = rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_KEEP, owner=OWNER, ttl=Duration(seconds=3600))
        await self.admin.Pause(request, timeout=DEADLINE_S)

    async def resume(self) -> None:
        await self.admin.Resume(rollout_pb2.ResumeRequest(owner=OWNER), timeout=DEADLINE_S)

    async def assert_samples(self, number: int) -> None:
        """The policy's tokens are those of this adapter."""
        sampling = tokens_pb2.SamplingParams(max_tokens=24, ignore_eos=True)
        request = rollout_pb2.GenerateRequest(token_ids=tokens_pb2.TokenIds(ids=PROMPT), sampling=sampling)
        sample = (await self.agent.Generate(request, timeout=DEADLINE_S)).samples[0]
        assert [Version.from_proto(span.policy_version) for span in sample.version_spans] == [Version(1, number)]
        self.assert_sampled(sample)

    def assert_sampled(self, sample: rollout_pb2.GeneratedSample) -> None:
        """Each token by the version that its span names."""
        ids, logprobs = list(sample.token_ids), torch.tensor(list(sample.logprobs))
        starts = [span.start for span in sample.version_spans]
        for span, end in zip(sample.version_spans, [*starts[1:], len(ids)], strict=True):
            version = Version.from_proto(span.policy_version)
            expected = (
                recompute(self.base, PROMPT, ids)
                if version == BASE
                else recompute_adapted(self.base, self.adapters[version.number], PROMPT, ids)
            )
            torch.testing.assert_close(logprobs[span.start : end], expected[span.start : end], atol=1e-4, rtol=0.0)


@pytest.fixture
def ports() -> Iterator[list[int]]:
    with held_ports(2) as ports:
        yield ports


@pytest.fixture
async def running(tmp_path: Path, ports: list[int]) -> AsyncIterator[Running]:
    base = save_model(tmp_path / "base", 1)
    adapters = [save_adapter(tmp_path / f"adapter{seed}", base, seed) for seed in range(5)]
    port, weightsync_port = ports
    settings = tmp_path / "run.toml"
    settings.write_text(
        SETTINGS.format(
            run=RUN,
            model=base,
            outputs=tmp_path / "outputs",
            stage=tmp_path / "stage",
            context=CONTEXT,
            start_s=DEADLINE_S,
            port=port,
            weightsync_port=weightsync_port,
        )
    )
    target, sync = f"127.0.0.1:{port}", f"127.0.0.1:{weightsync_port}"
    security = SecurityConfig()
    async with (
        service("weightsync", "@", str(settings), health=sync, log=tmp_path / "weightsync.log", start_s=DEADLINE_S),
        service(
            "rollout", "@", str(settings), health=target, log=tmp_path / "rollout.log", start_s=DEADLINE_S
        ) as replica,
        connect(sync, security) as sync_channel,
        connect(target, security) as channel,
    ):
        yield Running(
            base,
            adapters,
            target,
            psutil.Process(replica.pid),
            AdapterPublisher(sync_channel, RUN),
            rollout_pb2_grpc.RolloutServiceStub(channel),
            rollout_pb2_grpc.RolloutAdminServiceStub(channel),
            common_pb2_grpc.ServerInfoServiceStub(channel),
            health_pb2_grpc.HealthStub(channel),
        )


async def test_a_sample_outlives_its_adapter_version(running):
    info = await running.info.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=DEADLINE_S)
    assert "lora" in info.features
    assert not info.unimplemented_rpcs
    await running.publish(1)
    pool = ReplicaPool([running.target], SecurityConfig(), PATIENT, lambda _replica: None)
    polling = asyncio.create_task(pool.run())
    engine = PolicyEngine(pool, RUN, DEADLINE_S)
    request = rollout_pb2.GenerateRequest(token_ids=tokens_pb2.TokenIds(ids=PROMPT), sampling=LONG, n=2)
    generating = await running.paused_amid(engine, request)
    for number in (2, 3):  # two fit: the first goes when the third comes
        await running.publish(number)
    await running.resume()
    async with asyncio.timeout(DEADLINE_S):
        response = await generating
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    assert engine.counts["continued"] == 2
    for sample in response.samples:
        versions = [Version.from_proto(span.policy_version) for span in sample.version_spans]
        assert versions == [Version(1, 1), Version(1, 3)]
        assert (len(sample.token_ids), sample.finish_reason) == (LONG.max_tokens, tokens_pb2.FINISH_REASON_LENGTH)
        running.assert_sampled(sample)
    status = await running.until(lambda status: status.running == 0)
    assert (status.last_error, status.last_pause.ToNanoseconds()) == ("", 0)
    await _assert_adapters_outlive_the_engine(running)


async def _assert_adapters_outlive_the_engine(running: Running) -> None:
    """An engine that is killed comes back with the version that it served, and follows on.

    It was spawned, since gRPC is in use by now: test_vllm_faults.py kills the owner of one that was forked.
    """
    request = rollout_pb2.GenerateRequest(token_ids=tokens_pb2.TokenIds(ids=PROMPT), sampling=LONG, n=4)
    waiting = asyncio.ensure_future(running.agent.Generate(request, timeout=DEADLINE_S))
    await running.until(lambda status: status.running == 4)
    max(running.process.children(recursive=True), key=lambda child: child.memory_info().rss).kill()
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await waiting
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    status = await running.until(lambda status: status.engine_restarts == 1 and status.state == SERVING)
    assert Version.from_proto(status.policy_version) == Version(1, 3)
    health = await running.health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    await running.assert_samples(3)
    await running.publish(4)
    await running.assert_samples(4)
    family = running.process.children(recursive=True)
    running.process.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, DEADLINE_S)
    assert not alive, "the replica's death ends its engine"
