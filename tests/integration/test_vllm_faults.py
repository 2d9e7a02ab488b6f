"""vLLM's processes die, and nobody waits for them or finds them left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from engine_waits import parts_of
from small_models import CONTEXT, VOCABULARY, recompute, save_model, staged

from rollout_svc.engines.base import EngineError, GenerationRequest, PauseMode, Sample, Sampling
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from sluice.versions import BASE, Version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 9, 17, 33]
ARGUMENTS = {"max_model_len": CONTEXT, "kv_cache_memory_bytes": 16 << 20}
SAMPLING = Sampling(max_tokens=16, ignore_eos=True)
DEADLINE_S = 240.0
"""Limit for an engine to start or to end; only a broken test takes so long."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), 1)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("second"), 2)


@pytest.fixture(scope="module")
def others() -> set[psutil.Process]:
    """Children of this process before the engine's own."""
    return engine_processes(os.getpid())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path, others: set[psutil.Process]) -> AsyncIterator[VllmEngine]:
    started = VllmEngine(str(model), VllmOptions(engine_args=ARGUMENTS, start_method="fork"))
    await started.start()
    yield started
    await started.stop()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def on_base_weights(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    yield
    if "engine" in request.fixturenames:
        await request.getfixturevalue("engine").reload_base()


def ask(sampling: Sampling = SAMPLING, prompt: list[int] | None = None, **more: int) -> GenerationRequest:
    return GenerationRequest("request", PROMPT if prompt is None else prompt, sampling, **more)


def engine_processes(parent: int) -> set[psutil.Process]:
    children = psutil.Process(parent).children(recursive=True)
    return {child for child in children if "resource_tracker" not in " ".join(child.cmdline())}


NAN = float("nan")
HOSTILE = {
    "id outside the vocabulary": ask(prompt=[5, VOCABULARY]),
    "negative id": ask(prompt=[5, -1]),
    "no prompt": ask(prompt=[]),
    "prompt too long": ask(prompt=[5] * (CONTEXT + 1)),
    "no samples": ask(n=0),
    "tiny temperature": ask(replace(SAMPLING, temperature=1e-9)),
    "temperature not a number": ask(replace(SAMPLING, temperature=NAN)),
    "top_p of zero": ask(replace(SAMPLING, top_p=0.0)),
    "stop token outside the vocabulary": ask(replace(SAMPLING, stop_token_ids=(VOCABULARY,))),
    "bias outside the vocabulary": ask(replace(SAMPLING, logit_bias={VOCABULARY: 1.0})),
    "bias not a number": ask(replace(SAMPLING, logit_bias={5: NAN})),
    "penalty that overflows": ask(replace(SAMPLING, repetition_penalty=1e-30)),
    "more alternatives than allowed": ask(replace(SAMPLING, top_logprobs=21)),
    "min_tokens above max_tokens": ask(replace(SAMPLING, min_tokens=17)),
    "empty stop string": ask(replace(SAMPLING, stop=("",))),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_request_is_refused_and_harms_nobody(engine, name):
    neighbour = asyncio.create_task(engine.sample(ask(replace(SAMPLING, max_tokens=64))))
    with pytest.raises(ValueError, match=r"\w"):
        await engine.sample(HOSTILE[name])
    assert len((await neighbour).samples[0].token_ids) == 64
    assert engine.status().healthy
    assert engine.status().queued == 0


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
async def test_seeds_of_long_prompts_beside_each_other_are_served(engine, seed):
    requests = [ask(replace(SAMPLING, seed=seed), prompt=[5 + i] * (CONTEXT - 20), n=2) for i in range(8)]
    results = await asyncio.gather(*[engine.sample(request) for request in requests])
    assert all(len(sample.token_ids) == 16 for result in results for sample in result.samples)
    assert engine.status().healthy


async def requests_in_the_middle(engine: VllmEngine) -> tuple[asyncio.Task[Any], AsyncIterator[Sample], list[int]]:
    """Pause between the first and the last token of two requests; return them, and the tokens that the stream gave.

    Where they end first, because this process was slow, try again.
    """
    long = ask(replace(SAMPLING, max_tokens=400))
    async with asyncio.timeout(DEADLINE_S):
        while True:
            unary = asyncio.create_task(engine.sample(long))
            stream = parts_of(engine.stream(long))
            received = (await anext(stream)).token_ids
            await engine.pause(PauseMode.KEEP)
            if engine.status().running + engine.status().queued == 2:
                return unary, stream, received
            await engine.resume()
            await unary
            async for _ in stream:
                pass


async def test_the_engine_s_death_is_told_at_once_and_a_restart_serves_the_last_version(engine, others, second):
    [core] = engine_processes(os.getpid()) - others
    await engine.apply(staged(second, Version(1, 3)))
    unary, stream, received = await requests_in_the_middle(engine)
    core.send_signal(signal.SIGKILL)
    with pytest.raises(EngineError, match="lost"):
        await asyncio.wait_for(unary, DEADLINE_S)
    with pytest.raises(EngineError, match="lost"):  # noqa: PT012 - chunks sent before the death may still come
        async with asyncio.timeout(DEADLINE_S):
            async for chunk in stream:
                received += chunk.token_ids
    assert received
    assert not engine.status().healthy
    with pytest.raises(EngineError, match="restart"):
        await engine.sample(ask())

    assert await engine.restart() == Version(1, 3)
    sample = (await engine.sample(ask())).samples[0]
    assert [span.version for span in sample.spans] == [Version(1, 3)]
    expected = recompute(second, PROMPT, sample.token_ids)
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0.0)


async def test_a_restart_without_the_staged_file_serves_the_base(engine, second, tmp_path):
    version = staged(second, Version(1, 3))
    moved = tmp_path / "gone.safetensors"
    moved.write_bytes(version.path.read_bytes())
    await engine.apply(replace(version, path=moved))
    moved.unlink()
    assert await engine.restart() == BASE
    assert engine.status().version == BASE
