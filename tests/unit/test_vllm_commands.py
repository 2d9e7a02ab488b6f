"""Commands to a vLLM that fails in them: an engine in an unknown state stops and says so."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_svc.engines.base import EngineError, PauseMode
from rollout_svc.engines.model_files import BaseModel
from rollout_svc.engines.vllm.engine import VllmEngine
from rollout_svc.engines.vllm.processes import OwnerThread, VllmProcesses
from rollout_svc.engines.vllm.requests import LoadRecorder
from rollout_svc.engines.vllm.weights import VllmWeights
from sluice.versions import Version
from weightsync.staged import StagedVersion


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

    def __init__(self, call_s: float, *, pause_s: float = 0.0) -> None:
        super().__init__(failing="")
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._slow(pause_s or call_s))
        self.collective_rpc = self.start_weight_update = self.update_weights = self._slow(call_s)
        self.finish_weight_update = self.resume_generation = self._slow(call_s)

    def _slow(self, seconds: float) -> Callable[..., Awaitable[Any]]:
        async def call(*_: object, **__: object) -> list[tuple[str, float]]:
            await asyncio.sleep(seconds)
            return [("ok", 0.0)]

        return call


DEADLINE_S = 0.4


def engine_to_update(llm: FailingLlm) -> VllmEngine:
    engine = engine_with(llm)
    engine._weights = VllmWeights(clear_cache=False, double_buffer=True, patch=False, deadline_s=DEADLINE_S)
    engine._weights.base = BaseModel((Path("model.safetensors"),), {})
    return engine


@pytest.mark.parametrize("llm", [SlowLlm(0.25), SlowLlm(0.01, pause_s=60.0), SlowLlm(0.35)])
async def test_the_calls_of_an_update_share_its_deadlines(llm: FailingLlm) -> None:
    """Each call ends in time; together they would take several times what an update may take."""
    engine = engine_to_update(llm)
    begun = time.monotonic()
    with pytest.raises(EngineError):
        await engine.apply(StagedVersion(Version(1, 1), Path("v.safetensors"), {}, ""))
    assert time.monotonic() - begun < 3 * DEADLINE_S


class ScriptedLlm(FailingLlm):
    """A vLLM whose worker ends each load of a version as scripted. It can always load the base."""

    def __init__(self, *outcomes: tuple[str, Any], load_s: float = 0.0) -> None:
        super().__init__(failing="")
        self._outcomes, self._load_s = list(outcomes), load_s
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
        await asyncio.sleep(0.0 if is_base else self._load_s)

    async def finish_weight_update(self, label: str | None) -> None:
        self.labels.append(label)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes longer than the deadlines of these tests."""
    module = SimpleNamespace(WeightTransferUpdateRequest=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", module)


FAILED, REFUSED = ("err", "a tensor has another shape"), ("refused", "the file is gone")


@pytest.mark.usefixtures("without_vllm")
async def test_a_version_refused_after_it_failed_half_way_brings_the_old_one_back() -> None:
    """The refused call changed nothing, but the one before left parts of the version in the model."""
    llm = ScriptedLlm(FAILED, REFUSED)
    engine = engine_to_update(llm)
    with pytest.raises(EngineError, match=r"the file is gone.*version 0\.0 keeps serving"):
        await engine.apply(StagedVersion(Version(1, 1), Path("v.safetensors"), {}, ""))
    assert llm.loaded == ["v.safetensors", "v.safetensors", "model.safetensors"]
    assert llm.labels == [None, None, "0.0"]
    assert engine.status().healthy


@pytest.mark.usefixtures("without_vllm")
async def test_a_version_that_fails_half_way_late_brings_the_old_one_back() -> None:
    """A second attempt would pass the deadline, and leave an engine that only a restart helps."""
    llm = ScriptedLlm(FAILED, FAILED, load_s=0.6 * DEADLINE_S)
    engine = engine_to_update(llm)
    with pytest.raises(EngineError, match=r"another shape.*version 0\.0 keeps serving"):
        await engine.apply(StagedVersion(Version(1, 1), Path("v.safetensors"), {}, ""))
    assert llm.loaded == ["v.safetensors", "model.safetensors"]
    assert engine.status().healthy


@pytest.mark.usefixtures("without_vllm")
async def test_a_version_that_fails_half_way_once_is_loaded_again() -> None:
    llm = ScriptedLlm(FAILED, ("ok", 0.0))
    engine = engine_to_update(llm)
    await engine.apply(StagedVersion(Version(1, 1), Path("v.safetensors"), {}, ""))
    assert llm.labels == [None, "1.1"]
    assert engine.status().version == Version(1, 1)


async def test_an_update_that_waits_for_another_command_is_cancelled_at_once() -> None:
    engine = engine_to_update(SlowLlm(0.0))
    async with engine._commands:
        waiting = asyncio.create_task(engine.apply(StagedVersion(Version(1, 1), Path("v.safetensors"), {}, "")))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=5)
        assert waiting.cancelled()


async def test_a_shutdown_that_hangs_is_left_to_itself() -> None:
    released = threading.Event()
    llm: Any = SimpleNamespace(output_handler=None, shutdown=lambda _seconds: released.wait(60))
    config: Any = SimpleNamespace()
    processes = VllmProcesses(llm, LoadRecorder(), config, True, OwnerThread(), frozenset())
    try:
        await asyncio.wait_for(processes.shut_down(0.05), 10)
    finally:
        released.set()


HANG_AND_LEAVE = """
import asyncio, multiprocessing, threading, time
from types import SimpleNamespace
from rollout_svc.engines.base import EngineError
from rollout_svc.engines.vllm import processes
from weightsync import vllm_plugin

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
    threading.Event().wait()

async def shutdown():
    owner = processes.OwnerThread()
    llm = SimpleNamespace(output_handler=None, shutdown=hang)
    await processes.VllmProcesses(llm, None, None, True, owner, frozenset()).shut_down(0.2)
    print("gave up")

async def start():
    processes._launch = hang
    try:
        await processes.launch("model", {}, fork=False, deadline_s=0.2)
    except EngineError:
        print("gave up")

async def processes_left(hanging):
    await hanging()
    for child in multiprocessing.active_children():
        child.join(5)
    print(len(multiprocessing.active_children()), "left")

async def running():
    await processes.OwnerThread().submit(engine_core)
    print("gave up")

"""


@pytest.mark.parametrize("what", ["shutdown", "start", "running"])
def test_a_vllm_that_hangs_or_runs_does_not_keep_the_process_from_ending(what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{HANG_AND_LEAVE}asyncio.run({what}())"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.endswith("gave up\n")


@pytest.mark.parametrize("what", ["shutdown", "start"])
def test_a_vllm_that_hangs_leaves_no_process_while_this_one_lives(what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{HANG_AND_LEAVE}asyncio.run(processes_left({what}))"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=40,
        check=True,
    )
    assert done.stdout.endswith("gave up\n0 left\n")
