"""Adapter versions from a push to the tokens: weight service, replica and engine are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.duration_pb2 import Duration
from peft import LoraConfig, get_peft_model_state_dict
from peft import get_peft_model as adapted
from rollout_stack import refused, until
from safetensors.torch import load_file
from small_adapters import recompute_adapted, save_adapter
from small_models import CONTEXT, load, recompute, save_model
from weightsync_stack import RUN, Stack, running_stack

from rollout_svc.admin import RolloutAdminServicer
from rollout_svc.config import LimitsConfig, LoraLimits, RolloutConfig
from rollout_svc.config import LoraConfig as LoraSettings
from rollout_svc.engines.base import EngineError, PauseMode
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from rollout_svc.replica import EngineSupervisor, ReplicaWeights
from rollout_svc.servicer import RolloutServicer
from rollout_svc.tokenizer import ModelTokenizer
from sluice.client import RolloutClient
from sluice.config import CommonConfig, PeersConfig, SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, SluiceError, connect
from sluice.rpc.drain import Drain
from sluice.v1 import rollout_pb2, rollout_pb2_grpc, tokens_pb2
from sluice.versions import BASE, Version, append_spans
from weightsync.publisher import AdapterPublisher

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 17, 33]
TIMEOUT_S = 60.0
LIMITS = LoraLimits(max_loras=3, max_rank=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "base", 1)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, base: Path) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [save_adapter(root / str(seed), base, seed) for seed in range(5)]


@dataclass
class Replica:
    """A replica that follows a weight service."""

    base: Path
    adapters: list[Path]
    engine: TransformersEngine
    weights: ReplicaWeights
    sync: Stack
    stage: Path
    target: str
    agent: rollout_pb2_grpc.RolloutServiceAsyncStub
    admin: rollout_pb2_grpc.RolloutAdminServiceAsyncStub

    async def publish(self, number: int, base: Version = BASE) -> Version:
        publisher = AdapterPublisher(self.sync.channel, RUN, base=base)
        await publisher.push_directory(Version(1, number), self.adapters[number], deadline_s=TIMEOUT_S)
        return Version(1, number)

    async def follow(self, number: int, base: Version = BASE) -> None:
        version = await self.publish(number, base)
        await until(lambda: self.engine.status().version == version)

    async def generate(self, max_tokens: int = 24, **more: Any) -> rollout_pb2.GenerateResponse:
        sampling = tokens_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = rollout_pb2.GenerateRequest(
            token_ids=tokens_pb2.TokenIds(ids=more.pop("prompt", PROMPT)), sampling=sampling, **more
        )
        return await self.agent.Generate(request, timeout=TIMEOUT_S)

    async def load(self, name: str, number: int) -> None:
        request = rollout_pb2.LoadAdapterRequest(adapter=name, version=Version(1, number).to_proto())
        await self.admin.LoadAdapter(request, timeout=TIMEOUT_S)

    async def unload(self, name: str) -> None:
        await self.admin.UnloadAdapter(rollout_pb2.UnloadAdapterRequest(adapter=name), timeout=TIMEOUT_S)

    async def status(self) -> rollout_pb2.GetStatusResponse:
        return await self.admin.GetStatus(rollout_pb2.GetStatusRequest(), timeout=TIMEOUT_S)

    def assert_sampled(self, sample: rollout_pb2.GeneratedSample, number: int | None) -> None:
        ids = list(sample.token_ids)
        if number is None:
            version, expected = BASE, recompute(self.base, PROMPT, ids)
        else:
            version, expected = Version(1, number), recompute_adapted(self.base, self.adapters[number], PROMPT, ids)
        assert [Version.from_proto(span.policy_version) for span in sample.version_spans] == [version]
        torch.testing.assert_close(torch.tensor(list(sample.logprobs)), expected, atol=1e-4, rtol=0.0)

    @property
    def staged(self) -> set[str]:
        """Versions whose directories lie in shared memory."""
        return {path.parent.name.split("-")[0] for path in self.stage.glob("sluice_adapters-*/*/adapter_config.json")}


@pytest.fixture
async def replica(base: Path, adapters: list[Path], tmp_path: Path) -> AsyncIterator[Replica]:
    engine = TransformersEngine(
        str(base), SlotOptions(max_model_len=CONTEXT, kv_cache_bytes=32 << 20, threads=1), LIMITS
    )
    await engine.start()
    async with running_stack(tmp_path / "outputs", model=str(base)) as sync:
        common = CommonConfig(run=RUN, model=str(base), peers=PeersConfig(weightsync=sync.target))
        config = RolloutConfig(replica="one", stage_dir=tmp_path / "stage", lora=LoraSettings(enabled=True))
        supervisor = EngineSupervisor(engine, 0, lambda _serving: None)
        weights = ReplicaWeights(common, config, supervisor)
        drain = Drain()
        requests = RolloutServicer(
            f"runs/{RUN}", supervisor, ModelTokenizer(None), LimitsConfig(), request_s=60.0, drain=drain
        )
        admin = RolloutAdminServicer("one", supervisor, weights, requests, drain=drain, drain_s=5.0)
        server = RpcServer("rollout", ServerConfig(), SecurityConfig())
        server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, requests, "sluice.v1.RolloutService")
        name = "sluice.v1.RolloutAdminService"
        server.add(rollout_pb2_grpc.add_RolloutAdminServiceServicer_to_server, admin, name)
        await server.start()
        task = asyncio.create_task(weights.run_forever())
        async with connect(server.target, SecurityConfig()) as channel:
            agent = rollout_pb2_grpc.RolloutServiceStub(channel)
            stub = rollout_pb2_grpc.RolloutAdminServiceStub(channel)
            yield Replica(base, adapters, engine, weights, sync, tmp_path / "stage", server.target, agent, stub)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await weights.close()
        await server.stop(0)
    await engine.stop()


async def test_each_published_adapter_is_taken(replica):
    for number in (1, 2):
        await replica.follow(number)
        replica.assert_sampled((await replica.generate()).samples[0], number)
    status = await replica.status()
    assert (status.last_error, status.last_pause.ToNanoseconds()) == ("", 0)
    assert Version.from_proto(status.policy_version) == Version(1, 2)
    assert [each.serves_policy for each in status.adapters] == [False, True]
    model = await replica.agent.GetModel(rollout_pb2.GetModelRequest(), timeout=TIMEOUT_S)
    assert (model.max_adapters, model.max_adapter_rank) == (LIMITS.max_loras, LIMITS.max_rank)
    listed = await replica.sync.visible()
    assert listed == [Version(1, 2), Version(1, 1)]


async def test_what_a_peft_model_holds_is_pushed_as_it_is(replica, tmp_path):
    model = adapted(load(replica.base), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))
    publisher = AdapterPublisher(replica.sync.channel, RUN)
    tensors, config = get_peft_model_state_dict(model), model.peft_config["default"].to_dict()
    report = await publisher.push(Version(1, 7), tensors, config, deadline_s=TIMEOUT_S)
    assert not report.duplicate
    assert (await publisher.push(Version(1, 7), tensors, config, deadline_s=TIMEOUT_S)).duplicate
    await until(lambda: replica.engine.status().version == Version(1, 7))


async def test_directories_go_with_the_adapters_that_the_engine_holds(replica):
    for number in range(4):
        await replica.follow(number)
    await until(lambda: replica.staged == {"v1.2", "v1.3"})
    await replica.load("a", 1)
    assert replica.staged == {"v1.1", "v1.3"}
    await replica.weights.close()
    assert replica.staged == set()


async def test_a_retired_sample_continues_on_the_newest_version(replica):
    """What the orchestrator does: the caller sends the tokens so far as prompt, and joins both parts."""
    await replica.follow(0)
    await replica.engine.pause(PauseMode.KEEP)
    old = asyncio.create_task(replica.generate(480))
    await until(lambda: replica.engine.status().queued == 1)
    await replica.engine.resume()
    begun = replica.engine.status().generated_tokens
    await until(lambda: replica.engine.status().generated_tokens > begun + 4)
    await replica.engine.pause(PauseMode.KEEP)
    others = []
    for number in (1, 2, 3):  # three fit: the oldest goes when the fourth comes
        await replica.follow(number)
        others.append(asyncio.create_task(replica.generate()))
        await until(lambda count=number: sum(info.requests for info in replica.engine.adapters()) >= min(count, 2))
    sample = (await old).samples[0]
    assert sample.finish_reason == tokens_pb2.FINISH_REASON_VERSION_RETIRED
    replica.assert_sampled(sample, 0)
    await replica.engine.resume()
    await asyncio.gather(*others)
    before = len(sample.token_ids)
    more = (await replica.generate(prompt=[*PROMPT, *sample.token_ids])).samples[0]
    append_spans(sample.version_spans, more.version_spans, before)
    sample.token_ids.extend(more.token_ids)
    sample.logprobs.extend(more.logprobs)
    spans = [(span.start, Version.from_proto(span.policy_version)) for span in sample.version_spans]
    assert spans == [(0, Version(1, 0)), (before, Version(1, 3))]
    expected = recompute_adapted(replica.base, replica.adapters[3], PROMPT, list(sample.token_ids))[before:]
    torch.testing.assert_close(torch.tensor(list(sample.logprobs)[before:]), expected, atol=1e-4, rtol=0.0)


async def test_named_adapters_stand_beside_the_policy(replica):
    await replica.follow(0)
    await replica.follow(1)
    for _ in range(2):  # idempotent
        await replica.load("eval", 0)
    named, policy = await asyncio.gather(replica.generate(adapter="eval"), replica.generate())
    replica.assert_sampled(named.samples[0], 0)
    replica.assert_sampled(policy.samples[0], 1)
    assert {tuple(each.adapters) for each in (await replica.status()).adapters} == {("eval",), ()}
    error = await refused(replica.admin.LoadAdapter(_load("b", 1), timeout=TIMEOUT_S))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTERS_FULL")
    assert "rollout.lora.max_loras" in error.message


async def test_the_client_knows_adapters(replica):
    await replica.publish(0)
    async with RolloutClient(replica.target) as client:
        await client.load_adapter("eval", Version(1, 0))
        sampling = tokens_pb2.SamplingParams(max_tokens=8, ignore_eos=True)
        answer = await client.generate(PROMPT, sampling, adapter="eval", return_text=False)
        replica.assert_sampled(answer.samples[0], 0)
        await client.unload_adapter("eval")
        with pytest.raises(SluiceError, match="no adapter 'eval' is loaded"):
            await client.generate(PROMPT, sampling, adapter="eval", return_text=False)


async def test_unloading_ends_the_requests_of_the_name(replica):
    await replica.publish(0)
    await replica.load("eval", 0)
    await replica.engine.pause(PauseMode.KEEP)
    task = asyncio.create_task(replica.generate(adapter="eval", n=2))
    await until(lambda: any(info.requests for info in replica.engine.adapters()))
    for _ in range(2):  # idempotent
        await replica.unload("eval")
    reasons = {sample.finish_reason for sample in (await task).samples}
    assert reasons == {tokens_pb2.FINISH_REASON_VERSION_RETIRED}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await replica.generate(adapter="eval")
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def _load(name: str, number: int) -> rollout_pb2.LoadAdapterRequest:
    return rollout_pb2.LoadAdapterRequest(adapter=name, version=Version(1, number).to_proto())


async def test_what_cannot_be_loaded_is_refused_with_its_reason(replica):
    load_adapter = replica.admin.LoadAdapter
    assert (await refused(load_adapter(_load("x", 4), timeout=TIMEOUT_S))).code is grpc.StatusCode.NOT_FOUND
    assert (await refused(load_adapter(_load("../x", 4), timeout=TIMEOUT_S))).code is grpc.StatusCode.INVALID_ARGUMENT
    await replica.sync.push(Version(1, 1), load_file(replica.base / "model.safetensors"), deadline_s=TIMEOUT_S)
    error = await refused(load_adapter(_load("x", 1), timeout=TIMEOUT_S))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_AN_ADAPTER")
    await replica.publish(2)
    await until(lambda: replica.engine.status().version == Version(1, 1))
    error = await refused(load_adapter(_load("x", 2), timeout=TIMEOUT_S))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_BASE")


async def test_an_adapter_of_a_pushed_version_brings_its_weights_along(replica, tmp_path):
    """And the way back to these weights copies nothing."""
    other = save_model(tmp_path / "other", 2)
    adapter = save_adapter(tmp_path / "adapter", other, 9)
    await replica.sync.push(Version(1, 1), load_file(other / "model.safetensors"), deadline_s=TIMEOUT_S)
    publisher = AdapterPublisher(replica.sync.channel, RUN, base=Version(1, 1))
    await publisher.push_directory(Version(1, 2), adapter, deadline_s=TIMEOUT_S)
    await until(lambda: replica.engine.status().version == Version(1, 2))
    sample = (await replica.generate()).samples[0]
    expected = recompute_adapted(other, adapter, PROMPT, list(sample.token_ids))
    torch.testing.assert_close(torch.tensor(list(sample.logprobs)), expected, atol=1e-4, rtol=0.0)
    request = rollout_pb2.UpdateWeightsRequest(version=Version(1, 1).to_proto())
    answer = await replica.admin.UpdateWeights(request, timeout=TIMEOUT_S)
    assert (Version.from_proto(answer.policy_version), answer.pause.ToNanoseconds()) == (Version(1, 1), 0)


async def test_weights_that_fail_to_load_under_an_adapter_leave_the_truth_about_what_serves(
    replica, tmp_path, monkeypatch
):
    """The engine takes the adapter away before it loads other weights. Whoever asks for the adapter again gets it."""
    other = save_model(tmp_path / "other", 2)
    await replica.follow(1)

    def refuse(staged: object) -> None:
        raise EngineError("the weights could not be copied")

    monkeypatch.setattr(replica.engine._running, "swap", refuse)
    await replica.sync.push(Version(1, 2), load_file(other / "model.safetensors"), deadline_s=TIMEOUT_S)
    await until(lambda: "could not be copied" in replica.weights.status().last_error)
    assert Version.from_proto((await replica.status()).policy_version) == BASE
    request = rollout_pb2.SetWeightPolicyRequest(
        mode=rollout_pb2.WEIGHT_POLICY_MODE_TARGET,
        version=Version(1, 1).to_proto(),
        owner="operator",
        ttl=Duration(seconds=60),
    )
    await replica.admin.SetWeightPolicy(request, timeout=TIMEOUT_S)
    await until(lambda: replica.engine.status().version == Version(1, 1))
    replica.assert_sampled((await replica.generate()).samples[0], 1)
