"""Loops of callers against the real tuner, weight service and replica: order, exactness, isolation, states."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from simulated_clock import SimulatedClock
from small_models import CONTEXT, save_model
from transformers import AutoTokenizer
from weightsync_stack import RUN, running_stack

from rollout_svc.admin import RolloutAdminServicer
from rollout_svc.config import LimitsConfig, LoraLimits, RolloutConfig
from rollout_svc.config import LoraConfig as RolloutLora
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from rollout_svc.replica import EngineSupervisor, ReplicaWeights
from rollout_svc.servicer import RolloutServicer
from rollout_svc.tokenizer import ModelTokenizer
from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, PeersConfig, SecurityConfig, ServerConfig
from sluice.render import tokenizer_digest
from sluice.rpc import RpcServer, SluiceError
from sluice.rpc.drain import Drain
from sluice.rpc.principals import add_token
from sluice.tuning import Training, Tuning, demonstration, row
from sluice.v1 import rollout_pb2, rollout_pb2_grpc, tokens_pb2, training_pb2_grpc, weightsync_pb2
from sluice.versions import Version
from trainer_svc.compute_config import LoraConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.tuner.adapters import AdapterBank
from trainer_svc.tuner.config import LimitsConfig as TunerLimits
from trainer_svc.tuner.config import TunerConfig
from trainer_svc.tuner.sampler import Sampler, adapter_name
from trainer_svc.tuner.servicer import TrainingServicer
from trainer_svc.tuner.tuner import LOOK_S, Tuner

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
IDLE_S = 3600.0
PROMPT = [5, 9, 17, 33]
LIMITS = LoraLimits(max_loras=3, max_rank=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "base", 1)


@dataclass
class Service:
    """A tuner and what it needs."""

    target: str
    tuner: Tuner

    def client(self, security: SecurityConfig | None = None) -> Tuning:
        return Tuning(self.target, security)


@contextlib.asynccontextmanager
async def replica(base: Path, weights: str, stage: Path) -> AsyncIterator[str]:
    """A replica that follows a weight service and serves adapters."""
    engine = TransformersEngine(
        str(base), SlotOptions(max_model_len=CONTEXT, kv_cache_bytes=32 << 20, threads=1), LIMITS
    )
    await engine.start()
    supervisor = EngineSupervisor(engine, 0, lambda _serving: None)
    common = CommonConfig(run=RUN, model=str(base), peers=PeersConfig(weightsync=weights))
    config = RolloutConfig(
        replica="one",
        stage_dir=stage,
        lora=RolloutLora(enabled=True, max_rank=LIMITS.max_rank, max_loras=LIMITS.max_loras),
    )
    following = ReplicaWeights(common, config, supervisor)
    tokenizer = ModelTokenizer(AutoTokenizer.from_pretrained(base))
    drain = Drain()
    servicer = RolloutServicer(f"runs/{RUN}", supervisor, tokenizer, LimitsConfig(), request_s=DEADLINE_S, drain=drain)
    admin = RolloutAdminServicer("one", supervisor, following, servicer, drain=drain, drain_s=5.0)
    server = RpcServer("rollout", ServerConfig(), SecurityConfig(), run=RUN)
    server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer, "sluice.v1.RolloutService")
    server.add(rollout_pb2_grpc.add_RolloutAdminServiceServicer_to_server, admin, "sluice.v1.RolloutAdminService")
    await server.start()
    task = asyncio.create_task(following.run_forever())
    try:
        yield server.target
    finally:
        task.cancel()
        await asyncio.wait({task})
        await following.close()
        await server.stop(0)
        await engine.stop()


@contextlib.asynccontextmanager
async def serving(
    base: Path, directory: Path, security: SecurityConfig | None = None, clock: Clock = CLOCK, **limits: float
) -> AsyncIterator[Service]:
    """A tuner with a weight service and a replica."""
    async with (
        running_stack(directory / "weights", model=str(base)) as weights,
        replica(base, weights.target, directory / "stage") as target,
    ):
        config = TunerConfig(
            lora=LoraConfig(rank=4, alpha=8.0), threads=1, device="cpu", limits=TunerLimits(**limits), weight_decay=0.0
        )
        common = CommonConfig(run=RUN, model=str(base), peers=PeersConfig(weightsync=weights.target, rollout=[target]))
        compute = ComputeThread()
        bank = await compute.run(
            lambda: AdapterBank(TrainEngine(config, base, 0)), deadline_s=DEADLINE_S, what="loading"
        )
        digest = tokenizer_digest(AutoTokenizer.from_pretrained(base))
        sampler = Sampler(common, config.deadlines, digest)
        tuner = Tuner(config, bank, sampler, compute, directory / "trainings", clock=clock)
        server = RpcServer("tuner", ServerConfig(), security or SecurityConfig(), run=RUN)
        server.add(
            training_pb2_grpc.add_TrainingServiceServicer_to_server,
            TrainingServicer(f"runs/{RUN}", lambda: tuner),
            "sluice.v1.TrainingService",
        )
        await server.start()
        running = [
            asyncio.create_task(each)
            for each in (tuner.run_forever(), tuner.remove_idle(), tuner.sampler.keep_to_base())
        ]
        try:
            yield Service(server.target, tuner)
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            await server.stop(0)
            await tuner.stop()
            await tuner.sampler.close()
            await compute.stop(DEADLINE_S)


def rows(seed: int) -> list[tokens_pb2.Trajectory]:
    """Eight demonstrations, which depend on the seed alone."""
    return [
        demonstration([2 + (seed + i) % 90, 7], [(seed * 7 + i * 3 + k) % 100 + 2 for k in range(6)]) for i in range(8)
    ]


async def taught(training: Training, batches: range) -> str:
    """Teach demonstrations; return the digest of the state."""
    for batch in batches:
        await training.forward_backward(rows(batch), objective="sft")
        await training.optim_step(1e-2)
    return (await (await training.save("taught"))).digest


async def test_a_loop_of_samples_and_gradients_learns(base: Path, tmp_path: Path) -> None:
    async with serving(base, tmp_path) as service, service.client() as tuning:
        training = await tuning.create(RUN, seed=3)
        rewards = []
        for step in range(20):
            sampling = tokens_pb2.SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True, seed=1000 * step)
            response = await (await training.sample(PROMPT, sampling, n=64))
            found = [sum(token < 40 for token in each.token_ids) / 4 for each in response.samples]
            mean = sum(found) / len(found)
            rewards.append(mean)
            await training.forward_backward(
                [row(response, index, value - mean) for index, value in enumerate(found)], objective="grpo"
            )
            applied = await training.optim_step(3e-2)
        assert (await applied).optimizer_steps == 20
        assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.15, rewards


async def test_a_step_of_rows_without_advantage_goes_on_with_the_momentum(base: Path, tmp_path: Path) -> None:
    async with serving(base, tmp_path) as service, service.client() as tuning:
        training = await tuning.create(RUN)
        before = await taught(training, range(1))
        response = await (await training.sample(PROMPT, tokens_pb2.SamplingParams(max_tokens=4, ignore_eos=True), n=2))
        result = await (await training.forward_backward([row(response, i, 0.0) for i in range(2)], objective="grpo"))
        assert result.loss == 0.0
        applied = await (await training.optim_step(1e-2))
        assert (applied.optimizer_steps, applied.grad_norm, applied.skipped) == (2, 0.0, False)
        assert (await (await training.save("after"))).digest != before
        with pytest.raises(SluiceError, match="NO_GRADIENT"):
            await (await training.optim_step(1e-2))


async def test_samples_come_from_the_adapter_as_the_operations_before_left_it(base: Path, tmp_path: Path) -> None:
    async with serving(base, tmp_path) as service, service.client() as tuning:
        training = await tuning.create(RUN)
        sampling = tokens_pb2.SamplingParams(max_tokens=8, ignore_eos=True)
        pending = []
        for batch in range(4):  # nothing is awaited in between
            pending.append(await training.sample(PROMPT, sampling, n=4))
            await training.forward_backward(rows(batch), objective="sft")
            await training.optim_step(1e-2)
        responses = [await each for each in pending]
        versions = [
            {span.policy_version.number for each in r.samples for span in each.version_spans} for r in responses
        ]
        assert versions == [{0}, {1}, {2}, {3}]
        # The trainer's own log-probabilities of what was sampled, under the weights at that time, are those of the replica.
        again = await tuning.create(RUN)
        for batch, response in enumerate(responses):
            result = await (await again.forward_backward([row(response, i, 1.0) for i in range(4)], objective="grpo"))
            assert result.metrics["max_abs_log_difference"] < 1e-4
            with pytest.raises(SluiceError):  # drop that gradient again
                await (await again.forward_backward([], objective="sft"))
            with pytest.raises(SluiceError, match="NO_GRADIENT"):
                await (await again.optim_step(1.0))
            await again.forward_backward(rows(batch), objective="sft")
            await again.optim_step(1e-2)


async def test_samples_go_on_when_replica_and_weight_service_have_forgotten_the_adapter(
    base: Path, tmp_path: Path
) -> None:
    async with serving(base, tmp_path) as service, service.client() as tuning:
        training = await tuning.create(RUN)
        await taught(training, range(1))
        sampling = tokens_pb2.SamplingParams(max_tokens=2, ignore_eos=True)
        first = await (await training.sample(PROMPT, sampling))
        assert first.samples[0].version_spans[0].policy_version.number == 1
        (replica,) = service.tuner.sampler._replicas
        unload = rollout_pb2.UnloadAdapterRequest(adapter=adapter_name(Version(1, 1)))
        await replica.admin.UnloadAdapter(unload)
        again = await (await training.sample(PROMPT, sampling))
        assert again.samples[0].version_spans[0].policy_version.number == 1, "it is loaded again"
        other = await tuning.create(RUN)
        await taught(other, range(1, 2))
        await (await other.sample(PROMPT, sampling))
        await replica.admin.UnloadAdapter(unload)
        forget = weightsync_pb2.DeleteVersionRequest(run=f"runs/{RUN}", version=Version(1, 1).to_proto())
        await service.tuner.sampler._versions.DeleteVersion(forget)
        last = await (await training.sample(PROMPT, sampling))
        assert last.samples[0].version_spans[0].policy_version.number == 3, "it is published again"


async def test_a_loop_that_awaits_no_result_is_held_back_by_the_service(base: Path, tmp_path: Path) -> None:
    async with serving(base, tmp_path) as service, service.client() as tuning:
        training = await tuning.create(RUN)
        pending = [await training.optim_step(0.0) for _ in range(150)]
        with pytest.raises(SluiceError, match="NO_GRADIENT"):
            await pending[-1]


async def test_two_trainings_side_by_side_compute_what_each_computes_alone(base: Path, tmp_path: Path) -> None:
    async with serving(base, tmp_path) as service, service.client() as tuning:
        alone = {
            name: await taught(await tuning.create(RUN, seed=seed), batches)
            for name, seed, batches in (("a", 1, range(6)), ("b", 2, range(10, 16)))
        }
        both = [await tuning.create(RUN, seed=1), await tuning.create(RUN, seed=2)]
        beside = await asyncio.gather(taught(both[0], range(6)), taught(both[1], range(10, 16)))
        assert list(beside) == [alone["a"], alone["b"]]
        assert alone["a"] != alone["b"]


async def test_a_saved_state_goes_on_bit_for_bit(base: Path, tmp_path: Path) -> None:
    async with serving(base, tmp_path) as service, service.client() as tuning:
        whole = await taught(await tuning.create(RUN, seed=5), range(6))
        first = await tuning.create(RUN, seed=5)
        for batch in range(3):
            await first.forward_backward(rows(batch), objective="sft")
            await first.optim_step(1e-2)
        saved = await (await first.save("half"))
        second = await tuning.create(RUN, seed=6)
        loaded = await (await second.load("half"))
        assert (loaded.digest, loaded.optimizer_steps) == (saved.digest, 3)
        assert await taught(second, range(3, 6)) == whole
        path = next(tmp_path.rglob("half.safetensors"))  # noqa: ASYNC240
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        with pytest.raises(SluiceError, match="STATE_DAMAGED"):
            await (await second.load("half"))
        with pytest.raises(SluiceError, match="UNKNOWN_STATE"):
            await (await second.load("none"))


async def test_principals_do_not_see_each_other(base: Path, tmp_path: Path) -> None:
    principals = tmp_path / "principals.toml"
    sent = {}
    for name, role in (("ann", "tenant"), ("bob", "tenant"), ("eve", "agent")):
        (tmp_path / name).write_text(add_token(principals, name, role))
        sent[name] = SecurityConfig(token_file=tmp_path / name)
    async with (
        serving(base, tmp_path, SecurityConfig(principals_file=principals), per_principal=2) as service,
        service.client(sent["ann"]) as ann,
        service.client(sent["bob"]) as bob,
        service.client(sent["eve"]) as eve,
    ):
        hers = await ann.create(RUN, name="one")
        assert (await ann.create(RUN, name="one")).name == hers.name, "the same call is the same training"
        await taught(hers, range(1))
        his = await bob.create(RUN, name="one")
        assert his.name != hers.name
        assert list((await ann.list()).states) == ["taught"]
        assert not (await bob.list()).states
        his.name = hers.name
        with pytest.raises(SluiceError, match="UNKNOWN_TRAINING"):
            await his.optim_step(1.0)
        with pytest.raises(SluiceError) as refused:
            await eve.create(RUN)
        assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda t: t.forward_backward([demonstration([5], [500])], objective="sft"), "token_ids"),
        (lambda t: t.forward_backward(rows(1), objective="os:system"), "objective"),
        (lambda t: t.forward_backward(rows(1), objective="ppo"), "objective"),
        (lambda t: t.forward_backward(rows(1), objective="grpo"), "advantages"),
        (lambda t: t.forward_backward(rows(1), objective="sft", parameters={"eps_high": -1}), "parameters"),
        (lambda t: t.forward_backward(rows(1), objective="sft", divisor=float("nan")), "divisor"),
        (lambda t: t.optim_step(float("inf")), "learning_rate"),
        (lambda t: t.save("../escape"), "state"),
        (lambda t: t.sample(PROMPT, n=1000), "request.n"),
    ],
)
async def test_a_malformed_operation_fails_and_those_after_it_run(shared, call, field) -> None:
    training = shared
    with pytest.raises(SluiceError) as refused:
        await (await call(training))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert any(field in name for name in refused.value.violations), refused.value.violations
    with contextlib.suppress(SluiceError):
        await (await training.optim_step(0.0))  # drops the gradient that is not whole
    assert (await (await training.forward_backward(rows(1), objective="sft"))).tokens == 48
    assert not (await (await training.optim_step(0.0))).skipped


@pytest.fixture
async def shared(base, tmp_path):
    async with serving(base, tmp_path) as service, service.client() as tuning:
        yield await tuning.create(RUN)


async def test_an_idle_training_is_saved_and_deleted(base: Path, tmp_path: Path) -> None:
    clock = SimulatedClock()
    async with serving(base, tmp_path, clock=clock, idle_s=IDLE_S, trainings=2) as service, service.client() as tuning:
        training = await tuning.create(RUN)
        await clock.advance(IDLE_S)
        await taught(training, range(1))
        await clock.advance(IDLE_S)
        assert service.tuner.of("anyone"), "it was used in the meantime"
        await clock.until(lambda: not service.tuner.of("anyone"), step_s=LOOK_S)
        with pytest.raises(SluiceError, match="UNKNOWN_TRAINING"):
            await training.optim_step(1.0)
        assert any(each.startswith("idle-") for each in (await tuning.list()).states)
