"""Commands to a vLLM that fails in them: an engine in an unknown state stops and says so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_clock import LIMIT_S, SimulatedClock

from rollout_svc.engines.base import EngineError, PauseMode
from rollout_svc.engines.model_files import BaseModel
from rollout_svc.engines.vllm.engine import VllmEngine
from rollout_svc.engines.vllm.processes import OwnerThread, VllmProcesses
from rollout_svc.engines.vllm.requests import LoadRecorder
from rollout_svc.engines.vllm.weights import VllmWeights
from sluice.versions import Version
from weightsync.staged import StagedVersion

CHILD_S = 280.0
"""Limit for a process that imports the engines; one on a quiet machine takes seconds."""


class FailingLlm:
    """A vLLM whose process lives, and in which one call fails."""

    errored = False

    def __init__(self, failing: str) -> None:
        self._failing = failing
        self.ended: list[EngineError] = []
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._call("pause"))
        self.output_processor = SimpleNamespace(propagate_error=self.ended.append, request_states={})
        self.collective_rpc: Any = self._call("zero")
        self.resume_generation = self._call("resume")

    def _call(self, name: str) -> Callable[..., Awaitable[None]]:
        async def call(*_: object, **__: object) -> None:
            if name == self._failing:
                raise RuntimeError("out of memory")

        return call

    def get_num_unfinished_requests(self) -> int:
        return 0


def engine_with(llm: FailingLlm) -> VllmEngine:
    engine = VllmEngine("model")
    processes: Any = SimpleNamespace(
        llm=llm, recorder=LoadRecorder(), config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1))
    )
    engine._processes = processes
    return engine


@pytest.mark.parametrize("failing", ["pause", "zero", "resume"])
async def test_an_engine_whose_cache_cannot_be_cleaned_is_broken(failing: str) -> None:
    llm = FailingLlm(failing)
    engine = engine_with(llm)
    with pytest.raises(EngineError, match="out of memory"):
        await engine._scrub()
    assert not engine.status().healthy
    assert llm.ended, "requests in progress end with an error"


async def test_an_engine_that_cleans_its_cache_says_that_it_makes_no_steps() -> None:
    llm = FailingLlm("")
    engine, said = engine_with(llm), []

    async def zero(*_: object) -> None:
        said.append(engine.status().switching)

    llm.collective_rpc = zero
    assert not engine.status().switching
    await engine._scrub()
    assert said == [True]
    assert not engine.status().switching


async def test_an_engine_that_cannot_resume_is_broken() -> None:
    engine = engine_with(FailingLlm("resume"))
    await engine.pause(PauseMode.KEEP)
    assert engine.status().healthy
    with pytest.raises(EngineError, match="out of memory"):
        await engine.resume()
    assert not engine.status().healthy


async def test_an_engine_that_cannot_pause_serves_on() -> None:
    engine = engine_with(FailingLlm("pause"))
    with pytest.raises(EngineError, match="KEEP"):
        await engine.pause(PauseMode.WAIT)
    assert engine.status().healthy
    assert not engine.status().paused


class SlowLlm(FailingLlm):
    """A vLLM whose every call takes a while, one named call longer."""

    def __init__(self, clock: SimulatedClock, call_s: float, pause_s: float = 0.0) -> None:
        super().__init__(failing="")
        self._clock = clock
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._slow(pause_s or call_s))
        self.collective_rpc = self.start_weight_update = self.update_weights = self._slow(call_s)
        self.finish_weight_update = self.resume_generation = self._slow(call_s)

    def _slow(self, seconds: float) -> Callable[..., Awaitable[Any]]:
        async def call(*_: object, **__: object) -> list[tuple[str, float]]:
            await self._clock.sleep(seconds)
            return [("ok", 0.0)]

        return call


DEADLINE_S = 4.0
STAGED = StagedVersion(Version(1, 1), Path("v.safetensors"), {}, "")


def engine_to_update(llm: FailingLlm, clock: SimulatedClock | None = None) -> VllmEngine:
    """Return an engine on a clock that stands still unless the test moves it."""
    engine = engine_with(llm)
    engine._weights = VllmWeights(
        clear_cache=False, double_buffer=True, patch=False, deadline_s=DEADLINE_S, clock=clock or SimulatedClock()
    )
    engine._weights.base = BaseModel((Path("model.safetensors"),), {})
    return engine


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes seconds."""
    module = SimpleNamespace(WeightTransferUpdateRequest=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", module)


@pytest.mark.usefixtures("without_vllm")
@pytest.mark.parametrize(("call_s", "pause_s"), [(2.5, 0.0), (0.1, 600.0), (3.5, 0.0)])
async def test_the_calls_of_an_update_share_its_deadlines(call_s: float, pause_s: float) -> None:
    """Each call ends in time, but together they would take several times the deadline of an update."""
    clock = SimulatedClock()
    engine = engine_to_update(SlowLlm(clock, call_s, pause_s), clock)
    begun = clock()
    applying = asyncio.create_task(engine.apply(STAGED))
    await clock.until(applying.done, step_s=0.1)
    with pytest.raises(EngineError):
        await applying
    assert clock() - begun < 3 * DEADLINE_S


class ScriptedLlm(FailingLlm):
    """A vLLM whose worker ends each load of a version as scripted. It can always load the base."""

    def __init__(self, *outcomes: tuple[str, Any], clock: SimulatedClock, load_s: float = 0.0) -> None:
        super().__init__(failing="")
        self._outcomes, self._clock, self._load_s = list(outcomes), clock, load_s
        self._last: tuple[str, Any] = ("ok", 0.0)
        self.collective_rpc = self._reply
        self.loaded: list[str] = []
        self.labels: list[str | None] = []

    async def _reply(self, method: str, **_: object) -> list[tuple[str, Any]]:
        return [self._last if method == "sluice_status" else ("ok", 0.0)]

    async def start_weight_update(self) -> None:
        """Open an update."""

    async def update_weights(self, request: Any) -> None:
        (path,) = request.update_info["paths"]
        self.loaded.append(path)
        is_base = path == "model.safetensors"
        self._last = ("ok", 0.0) if is_base else self._outcomes.pop(0)
        await self._clock.sleep(0.0 if is_base else self._load_s)

    async def finish_weight_update(self, label: str | None) -> None:
        self.labels.append(label)


FAILED, REFUSED = ("err", "a tensor has another shape"), ("refused", "the file is gone")


@pytest.mark.usefixtures("without_vllm")
async def test_a_version_refused_after_it_failed_half_way_brings_the_old_one_back() -> None:
    """The refused call changed nothing, but the previous call left parts of the version in the model."""
    llm = ScriptedLlm(FAILED, REFUSED, clock=SimulatedClock())
    engine = engine_to_update(llm)
    with pytest.raises(EngineError, match=r"the file is gone.*version 0\.0 keeps serving"):
        await engine.apply(STAGED)
    assert llm.loaded == ["v.safetensors", "v.safetensors", "model.safetensors"]
    assert llm.labels == [None, None, "0.0"]
    assert engine.status().healthy


@pytest.mark.usefixtures("without_vllm")
async def test_a_version_that_fails_half_way_late_brings_the_old_one_back() -> None:
    """A second attempt would pass the deadline, and leave an engine that only a restart helps."""
    clock = SimulatedClock()
    llm = ScriptedLlm(FAILED, FAILED, clock=clock, load_s=0.6 * DEADLINE_S)
    engine = engine_to_update(llm, clock)
    applying = asyncio.create_task(engine.apply(STAGED))
    await clock.until(applying.done, step_s=0.1)
    with pytest.raises(EngineError, match=r"another shape.*version 0\.0 keeps serving"):
        await applying
    assert llm.loaded == ["v.safetensors", "model.safetensors"]
    assert engine.status().healthy


@pytest.mark.usefixtures("without_vllm")
async def test_a_version_that_fails_half_way_once_is_loaded_again() -> None:
    llm = ScriptedLlm(FAILED, ("ok", 0.0), clock=SimulatedClock())
    engine = engine_to_update(llm)
    await engine.apply(STAGED)
    assert llm.labels == [None, "1.1"]
    assert engine.status().version == Version(1, 1)


async def test_an_update_that_waits_for_another_command_is_cancelled_at_once() -> None:
    clock = SimulatedClock()
    engine = engine_to_update(SlowLlm(clock, 0.0), clock)
    async with engine._commands:
        waiting = asyncio.create_task(engine.apply(STAGED))
        await clock.advance(0.0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=LIMIT_S)
        assert waiting.cancelled()


async def test_a_shutdown_that_hangs_is_left_to_itself() -> None:
    asked, released, clock = threading.Event(), threading.Event(), SimulatedClock()

    def hang(_seconds: float) -> None:
        asked.set()
        released.wait()

    llm: Any = SimpleNamespace(output_handler=None, shutdown=hang)
    config: Any = SimpleNamespace()
    processes = VllmProcesses(llm, LoadRecorder(), config, True, OwnerThread(), frozenset())
    ending = asyncio.create_task(processes.shut_down(10.0, clock))
    try:
        await clock.until(asked.is_set)
        await clock.advance(19.9)
        assert not ending.done()
        await clock.advance(0.2)
        await asyncio.wait_for(ending, LIMIT_S)
    finally:
        released.set()


HANG_AND_LEAVE = """
import asyncio, multiprocessing, threading, time
from types import SimpleNamespace
from rollout_svc.engines.base import EngineError
from rollout_svc.engines.vllm import processes
from simulated_clock import SimulatedClock
from weightsync import vllm_plugin

clock, hangs = SimulatedClock(), threading.Event()

def work(ready):
    vllm_plugin._die_with_parent()  # as the plugin does in every process of vLLM
    ready.set()
    time.sleep(600)

def engine_core():
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    context.Process(target=work, args=(ready,)).start()
    ready.wait()

def hang(*_):
    engine_core()
    hangs.set()
    threading.Event().wait()

async def until_the_deadline(work):
    working = asyncio.ensure_future(work)
    await clock.until(hangs.is_set)
    await clock.advance(3600)
    await working

async def shutdown():
    owner = processes.OwnerThread()
    llm = SimpleNamespace(output_handler=None, shutdown=hang)
    held = processes.VllmProcesses(llm, None, None, True, owner, frozenset())
    await until_the_deadline(held.shut_down(10.0, clock))
    print("gave up")

async def start():
    processes._launch = hang
    try:
        await until_the_deadline(processes.launch("model", {}, fork=False, deadline_s=10.0, clock=clock))
    except EngineError:
        print("gave up")

async def processes_left(hanging):
    await hanging()
    for child in multiprocessing.active_children():
        child.join(60)
    print(len(multiprocessing.active_children()), "left")

async def running():
    await processes.OwnerThread().submit(engine_core)
    print("gave up")

"""


def output_of(call: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"{HANG_AND_LEAVE}asyncio.run({call})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=CHILD_S,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("what", ["shutdown", "start", "running"])
def test_a_vllm_that_hangs_or_runs_does_not_keep_the_process_from_ending(what: str) -> None:
    assert output_of(f"{what}()").endswith("gave up\n")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["shutdown", "start"])
def test_a_vllm_that_hangs_leaves_no_process_while_this_one_lives(what: str) -> None:
    assert output_of(f"processes_left({what})").endswith("gave up\n0 left\n")
