"""Commands to a vLLM that fails in them: an engine in an unknown state stops and says so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_svc.engines.base import EngineError, PauseMode
from rollout_svc.engines.vllm.engine import VllmEngine


class FailingLlm:
    """A vLLM whose process lives, and in which one call fails."""

    errored = False

    def __init__(self, failing: str) -> None:
        self._failing = failing
        self.ended: list[EngineError] = []
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._call("pause"))
        self.output_processor = SimpleNamespace(propagate_error=self.ended.append, request_states={})
        self.collective_rpc = self._call("zero")
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
        llm=llm,
        recorder=SimpleNamespace(running=0, kv_cache_usage=0.0),
        config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1)),
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
