"""An engine that dies is started again on the version that it served, and whoever asks is told meanwhile."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from engine_waits import first_tokens_only
from rollout_stack import Replica, build_engine, running_engine, until
from small_models import greedy, save_model, staged

from rollout_svc.engines.base import EngineError, GenerationRequest, PauseMode, Sampling
from rollout_svc.engines.slots.engine import TransformersEngine
from rollout_svc.replica import EngineSupervisor
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2
from sluice.versions import BASE, Version

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 17, 33]
GREEDY = GenerationRequest("request", PROMPT, Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
LONG = replace(GREEDY, sampling=replace(GREEDY.sampling, max_tokens=400))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("supervision") / "base", 1)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("supervision") / "second", 2)


@dataclass
class Watched:
    """A supervisor at work."""

    engine: TransformersEngine
    supervisor: EngineSupervisor
    told: list[bool]
    may_restart: asyncio.Event
    watch: asyncio.Task[None]

    async def until_restarted(self, times: int = 1) -> None:
        await until(lambda: self.supervisor.restarts == times)


async def at_once(restart: Callable[[], Awaitable[Version]]) -> Version:
    return await restart()


@pytest.fixture
async def watched(model: Path) -> AsyncIterator[Watched]:
    told: list[bool] = []
    may_restart = asyncio.Event()
    may_restart.set()

    async def when_allowed(restart: Callable[[], Awaitable[Version]]) -> Version:
        await may_restart.wait()
        return await restart()

    async with running_engine(model) as engine:
        assert isinstance(engine, TransformersEngine)
        supervisor = EngineSupervisor(engine, 2, told.append)
        watch = asyncio.create_task(supervisor.watch_forever(when_allowed))
        yield Watched(engine, supervisor, told, may_restart, watch)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


def kill(engine: TransformersEngine) -> None:
    """Make the next step fail, as a device does that falls off the bus."""
    engine._running.batch._cache.keys = torch.zeros(0)


async def die(engine: TransformersEngine) -> None:
    with pytest.raises(EngineError):
        await _sample_until_it_dies(engine)
    assert not engine.status().healthy


async def _sample_until_it_dies(engine: TransformersEngine) -> None:
    await engine.pause(PauseMode.KEEP)  # or the request may have ended before the step that fails
    task = asyncio.create_task(engine.sample(LONG))
    await until(lambda: engine.status().queued == 1)
    kill(engine)
    await engine.resume()
    await task


async def test_it_serves_the_same_version_again(watched, second):
    await watched.engine.apply(staged(second, Version(1, 1)))
    await die(watched.engine)
    await watched.until_restarted()
    assert watched.told == [False, True]
    assert watched.supervisor.ready.status().version == Version(1, 1)
    answer = await watched.supervisor.ready.sample(GREEDY)
    assert answer.samples[0].token_ids == greedy(second, PROMPT, 12)


async def test_who_asks_meanwhile_is_told_when_to_retry(watched):
    watched.may_restart.clear()
    await die(watched.engine)
    with pytest.raises(SluiceError, match="restarts") as refusal:
        _ = watched.supervisor.ready
    assert refusal.value.retry_after_s
    watched.may_restart.set()
    await watched.until_restarted()
    assert watched.supervisor.ready is watched.engine


async def test_a_second_death_is_survived_as_well(watched, model):
    for times in (1, 2, 3):
        await die(watched.engine)
        await watched.until_restarted(times)
        await until(lambda: watched.supervisor.failures == 0)
    assert (await watched.engine.sample(GREEDY)).samples[0].token_ids == greedy(model, PROMPT, 12)


async def test_what_it_served_may_be_gone_then_the_base_serves(watched, model, second, tmp_path):
    path = tmp_path / "staged.safetensors"
    shutil.copy(second / "model.safetensors", path)
    await watched.engine.apply(replace(staged(second, Version(1, 1)), path=path))
    path.write_bytes(b"damaged")
    await die(watched.engine)
    await watched.until_restarted()
    assert watched.engine.status().version == BASE
    assert (await watched.engine.sample(GREEDY)).samples[0].token_ids == greedy(model, PROMPT, 12)


async def test_it_gives_up_after_so_many_failures_in_a_row(model, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    engine = build_engine(copy)
    await engine.start()
    supervisor = EngineSupervisor(engine, 1, lambda _serving: None)
    shutil.rmtree(copy)
    await die(engine)
    with pytest.raises(EngineError, match="2 times in a row"):
        await asyncio.wait_for(supervisor.watch_forever(at_once), 60)
    await engine.stop()


async def test_a_pause_outlives_the_engine_that_it_began_on(model):
    async with running_engine(model) as engine, Replica(model, engine) as replica:
        replica.supervisor._allowed = 1
        duties = [
            asyncio.create_task(replica.supervisor.watch_forever(at_once)),
            asyncio.create_task(replica.admin.expire_pauses_forever()),
        ]
        pause = rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_KEEP, owner="a")
        pause.ttl.FromSeconds(3600)
        async with replica.admin_stub() as admin:
            with first_tokens_only(engine):
                task = asyncio.create_task(engine.sample(LONG))
                await until(lambda: engine.status().running == 1)
                await admin.Pause(pause, timeout=60)
                kill(engine)
            await engine.resume()  # samples a step, which fails
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: replica.supervisor.restarts == 1 and engine.status().paused)
            assert (await admin.Resume(rollout_pb2.ResumeRequest(owner="a"), timeout=60)).running
            assert len((await engine.sample(GREEDY)).samples[0].token_ids) == 12
        for duty in duties:
            duty.cancel()
        await asyncio.gather(*duties, return_exceptions=True)


async def test_a_pause_that_its_caller_gave_up_leaves_the_engine_sampling(model):
    async with running_engine(model) as engine, Replica(model, engine) as replica, replica.admin_stub() as admin:
        with first_tokens_only(engine):
            task = asyncio.create_task(engine.sample(LONG))
            await until(lambda: engine.status().running == 1)
            pause = rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_WAIT, owner="a")
            pause.ttl.FromSeconds(3600)
            call = admin.Pause(pause, timeout=60)
            late = asyncio.create_task(engine.sample(GREEDY))
            await until(lambda: replica.admin._pauses.owner == "a")
            call.cancel()
            await until(lambda: not replica.admin._pauses.owner)
        assert len((await task).samples[0].token_ids) == 400
        assert len((await late).samples[0].token_ids) == 12
        assert not engine.status().paused


async def test_requests_frozen_by_an_earlier_pause_end_in_a_later_wait(model):
    async with running_engine(model) as engine:
        with first_tokens_only(engine):
            task = asyncio.create_task(engine.sample(LONG))
            await until(lambda: engine.status().running == 1)
            await engine.pause(PauseMode.KEEP)
        await asyncio.wait_for(engine.pause(PauseMode.WAIT), 60)
        assert len((await task).samples[0].token_ids) == 400
        assert engine.status().paused
