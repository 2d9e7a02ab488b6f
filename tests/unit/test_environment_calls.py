"""Code of an environment runs in threads of its own: what hangs is given up, replaced and counted."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.envs.base import Task
from orchestrator_svc.workflows import EnvironmentCalls, EpisodeData, Sampling, choose_workflow
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2
from sluice.versions import BASE

DEADLINE_S = 30.0


@pytest.fixture
def stuck():
    """An event that nobody sets until the test is over."""
    event = threading.Event()
    yield event
    event.set()


async def hang(calls: EnvironmentCalls, stuck: threading.Event, count: int) -> None:
    outcomes = await asyncio.gather(*(calls.run(stuck.wait) for _ in range(count)), return_exceptions=True)
    assert all(isinstance(each, TimeoutError) for each in outcomes)


async def test_hung_calls_stop_neither_later_calls_nor_the_resolver(stuck) -> None:
    calls = EnvironmentCalls(threads=2, deadline_s=0.05)
    await hang(calls, stuck, 64)
    assert calls.hung == 64
    async with asyncio.timeout(DEADLINE_S):
        assert await calls.run(lambda: "answer") == "answer"
        assert await asyncio.get_running_loop().getaddrinfo("localhost", 1, type=socket.SOCK_STREAM)


async def test_no_more_calls_run_at_a_time_than_there_are_threads() -> None:
    calls = EnvironmentCalls(threads=3, deadline_s=DEADLINE_S)
    lock, both = threading.Lock(), threading.Barrier(3)
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait(DEADLINE_S)
        with lock:
            running -= 1

    await asyncio.gather(*(calls.run(work) for _ in range(9)))
    assert most == 3


async def test_an_environment_that_keeps_hanging_is_given_up_with_the_setting_to_look_at(stuck) -> None:
    calls = EnvironmentCalls(threads=8, deadline_s=0.02, most_hung=8)
    await hang(calls, stuck, 8)
    with pytest.raises(SluiceError, match="environment_s"):
        await calls.run(lambda: None)
    stuck.set()
    async with asyncio.timeout(DEADLINE_S):
        while calls.hanging:  # noqa: ASYNC110 - the threads end on their own
            await asyncio.sleep(0.01)
    assert await calls.run(lambda: 1) == 1


class Asks:
    """A single-turn environment whose question runs as it is given."""

    name = "asks"

    def __init__(self, question) -> None:
        self.question = question

    def tasks(self, split, seed):
        return [Task("t")]

    def messages(self, task):
        return [{"role": "user", "content": str(self.question())}]

    def score(self, task, completion):
        return 0.0


class Echo:
    """An engine that answers nothing and keeps what it was asked."""

    asked = ""

    async def agenerate(self, request):
        self.asked = request.conversation.messages[0].content
        return rollout_pb2.GenerateResponse()


async def ask(question, calls: EnvironmentCalls) -> str:
    engine = Echo()
    workflow = choose_workflow(OrchestratorConfig(), Asks(question), calls, None)
    data = EpisodeData(Task("t"), "g1", 1, Sampling(1.0, 8), BASE, "", 0)
    await workflow.arun_episode(engine, data)
    return engine.asked


async def test_a_question_of_a_single_turn_environment_runs_in_a_thread_and_is_given_up_when_it_hangs(stuck) -> None:
    assert await ask(threading.get_ident, EnvironmentCalls(1, DEADLINE_S)) != str(threading.get_ident())
    calls = EnvironmentCalls(1, 0.05)
    with pytest.raises(TimeoutError):
        await ask(lambda: stuck.wait(DEADLINE_S), calls)
    assert calls.hung == 1


async def test_what_the_environment_raises_reaches_the_caller() -> None:
    calls = EnvironmentCalls(threads=1, deadline_s=DEADLINE_S)

    def wrong() -> None:
        raise KeyError("task")

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(KeyError, match="task"):
        await calls.run(wrong)
    with pytest.raises(RuntimeError, match="SystemExit"):
        await calls.run(leave)
    assert calls.hung == 0
