"""A replica and the weight service, both real: following, holding, going back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
import torch
from engine_waits import first_tokens_only
from google.protobuf.duration_pb2 import Duration
from rollout_stack import refused, running_engine, until
from safetensors.torch import load_file
from small_adapters import save_adapter
from small_models import CONTEXT, greedy, save_model
from weightsync_stack import RUN, Stack, running_stack

from rollout_svc.admin import RolloutAdminServicer
from rollout_svc.config import LimitsConfig, RolloutConfig
from rollout_svc.engines.base import EngineError, GenerationRequest, InferenceEngine, PauseMode, Sampling
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from rollout_svc.replica import EngineSupervisor, ReplicaWeights
from rollout_svc.servicer import RolloutServicer
from rollout_svc.tokenizer import ModelTokenizer
from sluice.config import CommonConfig, FailedForGoodError, PeersConfig, SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, connect
from sluice.rpc.drain import Drain
from sluice.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.versions import BASE, Version
from weightsync.publisher import AdapterPublisher

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 17, 33]
GREEDY = GenerationRequest("request", PROMPT, Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
TIMEOUT_S = 60.0
HOUR = Duration(seconds=3600)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("weights")
    return [save_model(root / f"v{number}", number + 1) for number in range(4)]


@dataclass
class Following:
    """A replica that follows a weight service."""

    models: list[Path]
    engine: InferenceEngine
    weights: ReplicaWeights
    sync: Stack
    admin: rollout_pb2_grpc.RolloutAdminServiceAsyncStub
    duty: asyncio.Task[None]

    async def publish(self, number: int) -> Version:
        version = Version(1, number)
        tensors = load_file(self.models[number] / "model.safetensors")
        await self.sync.push(version, tensors, deadline_s=TIMEOUT_S)
        return version

    @property
    def version(self) -> Version:
        return self.engine.status().version

    async def until_serves(self, version: Version) -> None:
        await until(lambda: self.version == version)

    async def assert_samples(self, number: int) -> None:
        sample = (await self.engine.sample(GREEDY)).samples[0]
        assert sample.token_ids == greedy(self.models[number], PROMPT, 12)
        assert [span.version for span in sample.spans] == [self.version]

    async def set_policy(self, mode: int, number: int | None = None, owner: str = "eval", ttl: Duration = HOUR) -> None:
        version = None if number is None else Version(1, number).to_proto()
        request = rollout_pb2.SetWeightPolicyRequest(mode=mode, version=version, owner=owner, ttl=ttl)
        await self.admin.SetWeightPolicy(request, timeout=TIMEOUT_S)

    async def status(self) -> rollout_pb2.GetStatusResponse:
        return await self.admin.GetStatus(rollout_pb2.GetStatusRequest(), timeout=TIMEOUT_S)


@pytest.fixture
async def following(models: list[Path], tmp_path: Path) -> AsyncIterator[Following]:
    async with running_engine(models[0]) as engine, follow(engine, models, tmp_path) as running:
        yield running


@asynccontextmanager
async def follow(
    engine: InferenceEngine, models: list[Path], tmp_path: Path, *, restarts: int = 0
) -> AsyncIterator[Following]:
    async with running_stack(tmp_path / "outputs", model=str(models[0])) as sync:
        common = CommonConfig(run=RUN, model=str(models[0]), peers=PeersConfig(weightsync=sync.target))
        config = RolloutConfig(replica="one", stage_dir=tmp_path / "stage")
        supervisor = EngineSupervisor(engine, restarts, lambda _serving: None)
        weights = ReplicaWeights(common, config, supervisor)
        drain = Drain()
        requests = RolloutServicer(
            f"runs/{RUN}", supervisor, ModelTokenizer(None), LimitsConfig(), request_s=60.0, drain=drain
        )
        servicer = RolloutAdminServicer("one", supervisor, weights, requests, drain=drain, drain_s=5.0)
        server = RpcServer("rollout", ServerConfig(), SecurityConfig())
        name = "sluice.v1.RolloutAdminService"
        server.add(rollout_pb2_grpc.add_RolloutAdminServiceServicer_to_server, servicer, name)
        await server.start()
        duties = [weights.run_forever(), *([supervisor.watch_forever(weights.restart_engine)] if restarts else [])]
        tasks = [asyncio.create_task(duty) for duty in duties]
        async with connect(server.target, SecurityConfig()) as channel:
            stub = rollout_pb2_grpc.RolloutAdminServiceStub(channel)
            yield Following(models, engine, weights, sync, stub, tasks[0])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await weights.close()
        await server.stop(0)


async def test_each_published_version_is_taken(following):
    assert list(following.weights.waits_for()) == [
        "the first version of the run's weights: the trainer has published none"
    ]
    for number in (1, 2):
        await following.until_serves(await following.publish(number))
        await following.assert_samples(number)
    await until(lambda: following.weights.status().updates == 2)
    assert list(following.weights.waits_for()) == []
    status = await following.status()
    assert (status.updates_applied, status.last_error) == (2, "")
    assert status.last_pause.ToNanoseconds() > 0
    assert status.weight_policy == rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW


async def test_a_version_is_taken_while_requests_are_under_way(following):
    long = GenerationRequest("long", PROMPT, Sampling(max_tokens=480, ignore_eos=True))
    with first_tokens_only(following.engine):  # the model is too fast: let the version come in the middle
        task = asyncio.create_task(following.engine.sample(long))
        await until(lambda: following.engine.status().generated_tokens > 0)
        await following.engine.pause(PauseMode.KEEP)
    version = await following.publish(1)
    await following.until_serves(version)
    await following.engine.resume()
    sample = (await task).samples[0]
    assert [span.version for span in sample.spans] == [BASE, version]
    assert len(sample.token_ids) == 480


async def test_a_switch_that_takes_long_shows_in_the_status(following, monkeypatch):
    weights, proceed = following.engine._running._weights, threading.Event()
    copy = weights.copy
    monkeypatch.setattr(weights, "copy", lambda files: (proceed.wait(TIMEOUT_S), copy(files)))
    version = await following.publish(1)
    while (await following.status()).state != rollout_pb2.REPLICA_STATE_SWITCHING:  # noqa: ASYNC110 - over gRPC
        await asyncio.sleep(0.01)
    assert following.version == BASE
    proceed.set()
    await following.until_serves(version)
    assert (await following.status()).state == rollout_pb2.REPLICA_STATE_SERVING


async def test_a_held_replica_stays_and_tells_who_holds_it(following):
    await following.until_serves(await following.publish(1))
    await following.set_policy(rollout_pb2.WEIGHT_POLICY_MODE_HOLD)
    newest = await following.publish(2)
    status = await following.status()
    assert (status.weight_policy, status.weight_policy_owner) == (rollout_pb2.WEIGHT_POLICY_MODE_HOLD, "eval")
    update = rollout_pb2.UpdateWeightsRequest()
    error = await refused(following.admin.UpdateWeights(update, timeout=TIMEOUT_S))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "POLICY_HELD")
    assert "eval" in error.message
    policy = rollout_pb2.SetWeightPolicyRequest(mode=rollout_pb2.WEIGHT_POLICY_MODE_HOLD, owner="other", ttl=HOUR)
    error = await refused(following.admin.SetWeightPolicy(policy, timeout=TIMEOUT_S))
    assert error.reason == "POLICY_HELD"
    assert following.version == Version(1, 1)
    await following.set_policy(rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW)
    await following.until_serves(newest)


async def test_a_hold_ends_by_its_time_to_live(following):
    await following.set_policy(rollout_pb2.WEIGHT_POLICY_MODE_HOLD, ttl=Duration(nanos=300_000_000))
    await following.until_serves(await following.publish(1))


async def test_a_target_may_lie_behind(following):
    for number in (1, 2):
        await following.until_serves(await following.publish(number))
    await following.set_policy(rollout_pb2.WEIGHT_POLICY_MODE_TARGET, 1)
    await following.until_serves(Version(1, 1))
    await following.assert_samples(1)


async def test_an_update_is_answered_when_it_serves(following):
    version = await following.publish(1)
    update = rollout_pb2.UpdateWeightsRequest(version=version.to_proto())
    answer = await following.admin.UpdateWeights(update, timeout=TIMEOUT_S)
    assert Version.from_proto(answer.policy_version) == following.version == version
    again = await following.admin.UpdateWeights(update, timeout=TIMEOUT_S)
    assert again.pause.ToNanoseconds() == 0


async def test_a_status_request_that_awaits_a_version_is_answered_when_it_serves(following):
    awaited = Version(1, 1).to_proto()
    request = rollout_pb2.GetStatusRequest(awaited_version=awaited, wait=Duration(seconds=60))
    waiting = asyncio.ensure_future(following.admin.GetStatus(request, timeout=TIMEOUT_S))
    assert (await following.status()).policy_version.number == 0, "others are answered at once"
    assert not waiting.done()
    await following.publish(1)
    assert (await waiting).policy_version == awaited
    assert (await following.admin.GetStatus(request, timeout=TIMEOUT_S)).policy_version == awaited


async def test_a_status_request_waits_no_longer_than_it_says(following):
    request = rollout_pb2.GetStatusRequest(awaited_version=Version(9, 9).to_proto(), wait=Duration(nanos=1_000_000))
    answer = await following.admin.GetStatus(request, timeout=TIMEOUT_S)
    assert Version.from_proto(answer.policy_version) < Version(9, 9)
    for seconds in (-1, 61):
        request.wait.seconds = seconds
        request.wait.nanos = 0
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await following.admin.GetStatus(request, timeout=TIMEOUT_S)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_version_is_not_found_and_the_old_one_serves(following):
    await following.until_serves(await following.publish(1))
    update = rollout_pb2.UpdateWeightsRequest(version=Version(1, 77).to_proto())
    error = await refused(following.admin.UpdateWeights(update, timeout=TIMEOUT_S))
    assert error.code is grpc.StatusCode.NOT_FOUND
    await following.assert_samples(1)


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (rollout_pb2.SetWeightPolicyRequest(owner="a", ttl=HOUR), "mode"),
        (rollout_pb2.SetWeightPolicyRequest(mode=rollout_pb2.WEIGHT_POLICY_MODE_HOLD, owner="a"), "ttl"),
        (rollout_pb2.SetWeightPolicyRequest(mode=rollout_pb2.WEIGHT_POLICY_MODE_HOLD, ttl=HOUR), "owner"),
        (
            rollout_pb2.SetWeightPolicyRequest(mode=rollout_pb2.WEIGHT_POLICY_MODE_TARGET, owner="a", ttl=HOUR),
            "version",
        ),
    ],
)
async def test_a_policy_needs_mode_owner_and_end(following, policy, field):
    error = await refused(following.admin.SetWeightPolicy(policy, timeout=TIMEOUT_S))
    assert list(error.violations) == [field]


async def test_a_model_of_another_shape_is_refused_and_the_old_one_serves(following):
    await following.until_serves(await following.publish(1))
    tensors = load_file(following.models[2] / "model.safetensors")
    del tensors["model.norm.weight"]
    await following.sync.push(Version(1, 2), tensors, deadline_s=TIMEOUT_S)
    await until(lambda: "model.norm.weight" in following.weights.status().last_error)
    await following.assert_samples(1)
    await following.until_serves(await following.publish(3))
    await following.assert_samples(3)
    await until(lambda: not following.weights.status().last_error)


def unlike_any_model(model: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(model / "model.safetensors")
    tensors["model.other.weight"] = tensors.pop("model.norm.weight")
    return tensors


async def test_a_replica_that_fits_no_version_of_the_run_ends_with_the_reason(following):
    await following.sync.push(Version(1, 1), unlike_any_model(following.models[1]), deadline_s=TIMEOUT_S)
    with pytest.raises(
        FailedForGoodError, match=r"unknown \['model\.other\.weight'\].*give trainer and replicas the same model"
    ):
        await asyncio.wait_for(following.duty, TIMEOUT_S)
    await following.assert_samples(0)


async def test_a_replica_whose_settings_refuse_the_adapters_of_the_run_ends_with_the_remedy(following, tmp_path):
    publisher = AdapterPublisher(following.sync.channel, RUN)
    adapter = save_adapter(tmp_path / "adapter", following.models[0], 1)
    await publisher.push_directory(Version(1, 1), adapter, deadline_s=TIMEOUT_S)
    with pytest.raises(FailedForGoodError, match=r"is an adapter: set rollout\.lora\.enabled = true"):
        await asyncio.wait_for(following.duty, TIMEOUT_S)


async def test_a_caller_learns_that_no_repetition_helps_where_a_version_does_not_fit(following):
    await following.until_serves(await following.publish(1))
    await following.sync.push(Version(1, 2), unlike_any_model(following.models[2]), deadline_s=TIMEOUT_S)
    update = rollout_pb2.UpdateWeightsRequest(version=Version(1, 2).to_proto())
    error = await refused(following.admin.UpdateWeights(update, timeout=TIMEOUT_S))
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "model.other.weight" in error.message
    assert not following.duty.done(), "another version may fit"


class RestartsOnTheBase(TransformersEngine):
    """Serves the base when a restart cannot load what it served, and says so with an error, as vLLM's engine does."""

    async def restart(self) -> Version:
        try:
            return await super().restart()
        except EngineError:
            await self.start()
            raise


async def test_an_engine_that_came_back_on_the_base_is_brought_to_the_newest_version(models, tmp_path):
    engine = RestartsOnTheBase(str(models[0]), SlotOptions(device="cpu", max_model_len=CONTEXT, threads=1))
    await engine.start()
    try:
        async with follow(engine, models, tmp_path, restarts=3) as following:
            version = await following.publish(1)
            await following.until_serves(version)
            (staged,) = (tmp_path / "stage").glob("*/*.safetensors")
            with staged.open("r+b") as file:
                file.write(b"damaged!")
            long = replace(GREEDY, sampling=replace(GREEDY.sampling, max_tokens=480))
            await engine.pause(PauseMode.KEEP)  # or the request may have ended before the damage is done
            task = asyncio.create_task(engine.sample(long))
            await until(lambda: engine.status().queued == 1)
            engine._running.batch._cache.keys = torch.zeros(0)  # the next step fails, and the engine is started again
            await engine.resume()
            with pytest.raises(EngineError):
                await task
            await until(lambda: engine.status().healthy)
            await following.until_serves(version)
            await following.assert_samples(1)
            status = await following.status()
            assert (status.engine_restarts, status.last_error) == (1, "")
    finally:
        await engine.stop()
