"""What vLLM's engine process says of its steps: a hang is seen, a long prompt is none, and lost places are counted."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio
from engine_waits import until
from small_models import CONTEXT, save_model, staged

from rollout_svc.engines.base import GenerationRequest, Pace, PauseMode, Sampling, Stage
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from rollout_svc.engines.vllm.processes import TESTED_PARTS, parts_of
from sluice.versions import Version

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CHUNK = 64
"""Prompt tokens of one step."""

ARGUMENTS = {
    "max_model_len": CONTEXT,
    "max_num_seqs": 16,
    "max_num_batched_tokens": CHUNK,
    "enable_chunked_prefill": True,
    "kv_cache_memory_bytes": 1 << 20,  # 2,048 tokens
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    model = save_model(tmp_path_factory.mktemp("model"), 1)
    started = VllmEngine(str(model), VllmOptions(engine_args=ARGUMENTS, start_method="fork", kv_policy="recompute"))
    await started.start()
    yield started
    await started.stop()


def ask(tokens: int, prompt: int = 4, n: int = 1) -> GenerationRequest:
    return GenerationRequest(
        "request", [5 + i % 100 for i in range(prompt)], Sampling(max_tokens=tokens, ignore_eos=True), n=n
    )


async def test_on_a_cpu_the_engine_has_the_parts_that_are_named_as_tested(engine):
    assert parts_of(engine._processes.config) == TESTED_PARTS or not engine._processes.on_cpu


async def test_each_part_of_a_long_prompt_is_a_step(engine):
    before = engine.status().steps
    await engine.sample(ask(1, prompt=CONTEXT - 12))
    assert engine.status().steps - before >= (CONTEXT - 12) // CHUNK


async def test_the_steps_of_a_hung_engine_stand_still_while_its_stream_says_that_it_runs(engine):
    others = set(psutil.Process(os.getpid()).children(recursive=True))
    core = max(others, key=lambda child: child.memory_info().rss)
    stream = engine.stream(ask(400), Pace(seconds=0.0))
    assert (await anext(stream)).parts
    core.send_signal(signal.SIGSTOP)
    try:
        while (progress := await anext(stream)).parts:  # what was on its way
            pass
        again = await anext(stream)
        assert not again.parts
        assert again.stage is progress.stage is Stage.RUNNING
        assert again.steps == progress.steps == engine.status().steps
    finally:
        core.send_signal(signal.SIGCONT)
    assert [each async for each in stream][-1].steps > again.steps


async def test_samples_that_lose_their_place_are_counted(engine):
    before = engine.status().preemptions
    result = await engine.sample(ask(400, n=12))
    assert [len(sample.token_ids) for sample in result.samples] == [400] * 12
    assert engine.status().preemptions > before


async def test_what_an_update_computes_again_has_not_lost_its_place(engine, tmp_path):
    before = engine.status().preemptions
    stream = engine.stream(ask(100, n=4), Pace(seconds=0.0))
    await anext(stream)
    await engine.apply(staged(save_model(tmp_path / "second", 2), Version(1, 1)))
    assert {span.version for each in [each async for each in stream] for part in each.parts for span in part.spans}
    assert engine.status().preemptions == before


async def test_a_request_that_has_no_place_is_queued(engine):
    stream = engine.stream(ask(400, n=16), Pace(seconds=0.0))
    await anext(stream)
    late = engine.stream(ask(4), Pace(seconds=0.0))
    first = await anext(late)
    assert (first.parts, first.stage) == ([], Stage.QUEUED)
    await engine.pause(PauseMode.KEEP)
    async for progress in late:
        if not progress.parts and progress.stage is Stage.PAUSED:
            break
    await engine.resume()
    await stream.aclose()
    assert [each async for each in late][-1].parts
    await until(lambda: engine.status().running == 0)


async def test_tokens_that_the_engine_keeps_back_come_in_time_and_before_a_pause_with_their_version(engine, tmp_path):
    """A stream that is read once in a while, an update in its midst, and an abort."""
    await engine.reload_base()
    stream = engine.stream(ask(400, n=2), Pace(seconds=0.25))
    given = {0: 0, 1: 0}
    spans: dict[int, list[tuple[int, Version]]] = {0: [], 1: []}
    messages = 0
    async for progress in stream:
        messages += 1
        for part in progress.parts:
            assert part.offset == given[part.index]
            assert len(part.logprobs) == len(part.token_ids)
            given[part.index] += len(part.token_ids)
            spans[part.index] += [span for span in part.spans if span.version not in {v for _, v in spans[part.index]}]
        if progress.parts and messages == 1:
            at = engine.status().generated_tokens
            await engine.apply(staged(save_model(tmp_path / "third", 3), Version(1, 2)))
            assert engine.status().generated_tokens >= at
    assert given == {0: 400, 1: 400}
    for each in spans.values():
        assert [version for _, version in each] == [Version(0, 0), Version(1, 2)]
        assert each[0][0] == 0
