"""Two replicas as processes: one is stopped, then killed, in the middle of a generation, and nobody who reads along can tell."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked_programs import forked
from rank_programs import RankPrograms
from simulated_clock import SimulatedClock
from small_models import greedy, recompute, save_model, text_of
from test_rollout_process import DEADLINE_S, SETTINGS
from test_rollout_process import Replica as Program

from sluice.config import SecurityConfig
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import ReplicaPool
from sluice.sampling.replica import Replica
from sluice.v1 import rollout_pb2, tokens_pb2

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 17]
TOKENS = 400
POLL_S = 10.0
"""In simulated seconds, which pass only while a stopped replica is to be noticed."""


async def until(condition: Callable[[], object]) -> None:
    """Wait for another process; the test has a deadline."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def pass_time(
    pool: ReplicaPool, clock: SimulatedClock, stopped: Replica, condition: Callable[[], object]
) -> None:
    """Let time pass until a condition holds; each replica but the stopped one answers a poll meanwhile."""
    while not condition():
        heard = {each: each.progress.heard_at for each in pool.replicas if each is not stopped}
        await clock.advance(POLL_S)
        await until(lambda heard=heard: all(each.progress.heard_at > before for each, before in heard.items()))


async def disturbed(engine: PolicyEngine, end: Callable[[Replica], None]) -> rollout_pb2.GenerateResponse:
    """Sample four continuations; do something to their replica when some tokens were read, and most were not."""
    request = rollout_pb2.GenerateRequest(
        token_ids={"ids": PROMPT},
        n=4,
        sampling={"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
        return_text=True,
    )
    ids: dict[int, list[int]] = {index: [] for index in range(4)}
    texts = dict.fromkeys(ids, "")
    async with engine.stream(request) as stream:
        async for message in stream:
            if message.chunk.deltas and not any(ids.values()):
                end(next(each for each in engine.pool.replicas if each.works))
            for delta in message.chunk.deltas:
                assert delta.offset == len(ids[delta.tokens.index])
                ids[delta.tokens.index].extend(delta.tokens.token_ids)
                texts[delta.tokens.index] += delta.tokens.text
    assert [(ids[each.index], texts[each.index]) for each in stream.response.samples] == [
        (list(each.token_ids), each.text) for each in stream.response.samples
    ], "what was read while it was sampled is the answer"
    return stream.response


def assert_whole(response: rollout_pb2.GenerateResponse, expected: list[int], logprobs: torch.Tensor) -> None:
    assert list(response.prompt_token_ids) == PROMPT
    assert [sample.index for sample in response.samples] == [0, 1, 2, 3]
    for sample in response.samples:
        assert list(sample.token_ids) == expected
        torch.testing.assert_close(torch.tensor(list(sample.logprobs)), logprobs, atol=1e-4, rtol=0.0)
        assert [(span.start, span.policy_version.number) for span in sample.version_spans] == [(0, 0)]
        assert sample.finish_reason == tokens_pb2.FINISH_REASON_LENGTH
        assert sample.text == text_of(token for token in expected if token > 1)


@pytest.mark.clock(reason="a real engine must still be sampling when it is stopped or killed")
async def test_a_generation_survives_a_stopped_and_a_killed_replica(
    tmp_path: Path, rank_programs: RankPrograms
) -> None:
    model = save_model(tmp_path / "model", 1)
    settings = tmp_path / "rollout.toml"
    settings.write_text(SETTINGS.format(model=model, drain_s=DEADLINE_S))
    command = (rank_programs, "sluice.cli.main", "rollout", "@", str(settings))
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    async with (
        forked(*command, log=logs[0]) as one,
        forked(*command, log=logs[1]) as two,
        asyncio.timeout(2 * DEADLINE_S),
    ):
        expected = greedy(model, PROMPT, TOKENS)  # while they start
        logprobs = recompute(model, PROMPT, expected)
        programs = [Program(one, logs[0]), Program(two, logs[1])]
        targets = [target for target, _ in await asyncio.gather(*(each.listening() for each in programs))]
        processes = dict(zip(targets, (one, two), strict=True))
        config, clock = ReplicasConfig(poll_s=POLL_S, progress_s=60.0), SimulatedClock()
        pool = ReplicaPool(targets, SecurityConfig(), config, lambda _: None, clock=clock)
        engine = PolicyEngine(pool, "test", DEADLINE_S)
        polling = asyncio.create_task(pool.run())
        noticing: dict[Replica, asyncio.Task[None]] = {}
        try:
            await until(lambda: sum(not each.why_not() for each in pool.replicas) == 2)

            def stop(replica: Replica) -> None:
                processes[replica.target].send_signal(signal.SIGSTOP)
                noticing[replica] = asyncio.create_task(pass_time(pool, clock, replica, lambda: replica.loss))

            assert_whole(await disturbed(engine, stop), expected, logprobs)
            ((stopped, noticed),) = noticing.items()
            await noticed
            assert (pool.counts["evicted_silent"], pool.counts["continued"]) == (1, 4)
            processes[stopped.target].send_signal(signal.SIGCONT)
            await pass_time(pool, clock, stopped, lambda: not stopped.why_not())

            assert_whole(await disturbed(engine, lambda replica: processes[replica.target].kill()), expected, logprobs)
            assert (pool.counts["evicted_dead"], pool.counts["continued"]) == (1, 8)
            assert pool.counts["tokens_kept"] > 0
        finally:
            tasks = {polling, *noticing.values()}
            for each in tasks:
                each.cancel()
            await asyncio.wait(tasks)
