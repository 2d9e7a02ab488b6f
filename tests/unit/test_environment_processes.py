"""Environments that hang, die, fill the memory, flood the log or return nonsense cost their own task and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import MappingProxyType

import pytest
import pytest_asyncio
import structlog

from sluice.config import ConfigError
from sluice.environments.base import Task
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.episode import ReplayDiffersError
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.rewards import exact_reward, math_reward
from sluice.environments.worker import End, EnvironmentFailedError, Reason

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILE = Path(__file__).parent / "misbehaving_environment.py"
TASK = Task("only", {"do": ""})
LONG_S = 60.0
"""A limit that no call reaches unless it hangs."""

SHORT_S = 1.0
"""A limit that a call reaches which hangs, after it has started processes."""

VERY_SHORT_S = 0.25
"""A limit under which no call is to end well: those that must have `LONG_S`, for the other kind of call."""

MEMORY_MIB = 150

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def pool(name: str, *, arguments=MappingProxyType({}), start_s: float = LONG_S, **settings) -> EnvironmentProcesses:
    config = EnvironmentProcessesConfig(**{"call_s": LONG_S, "score_s": LONG_S, **settings})
    return EnvironmentProcesses(f"{FILE}:{name}", dict(arguments), config, (start_s, "start_s"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def single() -> AsyncIterator[EnvironmentProcesses]:
    async with pool("Single", count=1, max_restarts=1000) as environment:
        yield environment


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty() -> AsyncIterator[EnvironmentProcesses]:
    """Gives up messages after a moment, and completions at once that it cannot score."""
    limits = {"call_s": VERY_SHORT_S, "score_retries": 0, "memory_mib": MEMORY_MIB, "max_restarts": 1000}
    async with pool("Single", count=1, **limits) as environment:
        yield environment


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def several() -> AsyncIterator[EnvironmentProcesses]:
    async with pool("Several", count=1, max_restarts=1000) as environment:
        yield environment


def of_group(group: int) -> list[int]:
    """Return the processes of a group."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def processes_with(mark: str) -> list[str]:
    """Return the processes that have an argument."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "cmdline").read_bytes().decode().split("\0"):
                found.append(entry.name)
    return found


async def until(condition) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110 - processes that are not ours announce nothing
            await asyncio.sleep(0.02)


async def test_tasks_come_page_by_page_with_their_data(single) -> None:
    tasks = await single.tasks("train", 5)
    assert len(tasks) == 2500
    assert tasks[2499] == Task("train-2504", {"number": 2499, "pair": [1, 2]})
    assert await single.messages(tasks[0]) == [{"role": "user", "content": "\ud800 0.0"}]


async def test_completions_are_scored_in_another_process_with_the_whole_task(single) -> None:
    task = Task("only", MappingProxyType({}), max_tokens=9)
    rewards = await single.score(task, ["a", "bb", "limit", "pid", "thread"])
    assert rewards[:3] == [1.0, 2.0, 9.0]
    assert rewards[3] != os.getpid()
    assert rewards[4] == 1.0, "in the main thread, where signals work"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("raise", Reason.RAISED),
        ("sys.exit", Reason.RAISED),
        ("nan", Reason.RAISED),
        ("object", Reason.RAISED),
        ("exit", Reason.DIED),
        ("kill", Reason.DIED),
        ("segfault", Reason.DIED),
    ],
)
async def test_a_completion_that_cannot_be_scored_is_missing_and_spoils_no_other(single, bad, reason) -> None:
    before = single.failures.copy()
    assert await single.score(TASK, ["a", bad, "bbb"]) == [1.0, None, 3.0]
    assert single.failures - before == {reason: 2, "missing": 1}
    assert await single.score(TASK, ["cc"]) == [2.0], "the pool goes on"


@linux_only
@pytest.mark.parametrize("word", ["hog", "hog shared memory"])
async def test_a_process_that_needs_too_much_memory_is_killed(hasty, word) -> None:
    before = hasty.failures.copy()
    assert await hasty.score(TASK, [word]) == [None]
    assert hasty.failures - before == {Reason.MEMORY: 1, "missing": 1}
    assert await hasty.score(TASK, ["a"]) == [1.0]


@linux_only
async def test_memory_that_processes_share_counts_once(hasty) -> None:
    assert await hasty.score(TASK, ["share with forks"]) == [16.0], "it and its forks have 100 MiB of 150"


async def test_calls_that_hang_cost_their_own_process_whether_they_hold_the_gil_or_not() -> None:
    async with pool("Single", count=4, call_s=VERY_SHORT_S) as environment:
        hanging = [Task("t", {"do": word}) for word in ("loop", "regex", "hold the GIL", "sleep")]
        calls = [*map(environment.messages, hanging), environment.score(TASK, ["a"])]
        *hung, rewards = await asyncio.gather(*calls, return_exceptions=True)
        assert [each.reason for each in hung] == [Reason.HUNG] * 4
        assert rewards == [1.0]
        assert environment.failures == {Reason.HUNG: 4}


async def test_the_loop_goes_on_while_a_process_hangs_and_its_end_prints_where(hasty) -> None:
    ticks = 0
    with structlog.testing.capture_logs() as logs:
        hanging = asyncio.create_task(hasty.messages(Task("poison", {"do": "regex"})))
        while not hanging.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(
            EnvironmentFailedError, match=r"messages of task poison did not end within 0.25 s .*call_s"
        ) as hung:
            await hanging
    assert (hung.value.reason, hung.value.task_id, hung.value.culprit) == (Reason.HUNG, "poison", True)
    assert ticks > 3
    printed = "\n".join(entry.get("text", "") for entry in logs)
    assert "misbehaving_environment.py" in printed
    assert "in act" in printed


async def test_an_error_carries_its_type_its_message_and_the_lines_of_the_environment_alone(single) -> None:
    with pytest.raises(EnvironmentFailedError, match="messages of task t raised KeyError: 'no such key'") as raised:
        await single.messages(Task("t", {"do": "raise"}))
    assert raised.value.reason == Reason.RAISED
    assert 'misbehaving_environment.py", line' in raised.value.message
    assert 'raise KeyError("no such key")' in raised.value.message
    assert "child.py" not in raised.value.message


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("decimal", r"value\[0\]\.content\[0\] is of type Decimal"),
        ("large", "at most 64 MiB can be sent"),
        ("itself", "levels deep"),
        ("text", r"messages\(task\): give a list of messages such as .*, not 'what is it\?'"),
    ],
)
async def test_what_is_not_plain_data_is_an_error_that_says_where(single, word, message) -> None:
    with pytest.raises(EnvironmentFailedError, match=message):
        await single.messages(Task("t", {"do": word}))
    assert await single.score(TASK, ["a"]) == [1.0]


async def test_a_task_that_is_not_plain_data_fails_its_call_and_harms_no_process(hasty) -> None:
    (process,) = await hasty.score(TASK, ["pid"])
    with pytest.raises(EnvironmentFailedError, match=r"cannot be called: arguments.task.data.do is of type object"):
        await hasty.messages(Task("t", {"do": object()}))
    await asyncio.sleep(1.2 * VERY_SHORT_S)  # no time limit runs on for it
    assert await hasty.score(TASK, ["pid"]) == [process]


async def test_a_process_that_is_about_to_end_gets_no_call_and_blames_none() -> None:
    async with pool("Several", count=1) as environment, environment.episode(TASK, 0) as episode:
        await episode.step("a")
        episode.worker.end_because(End(Reason.MEMORY, "was killed: it had too much memory"))
        steps = asyncio.create_task(episode.step("ab"))
        assert await asyncio.gather(environment.messages(TASK), return_exceptions=True)
        assert (await steps).messages[0]["content"] == "3"
        assert environment.failures == {Reason.RAISED: 1}, "a multi-turn environment has no messages"


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("raise", "cannot list the tasks of split raise: .*KeyError"),
        ("exit", "ended with exit code 3 in tasks"),
        ("wrong id", "task_id of type str"),
        ("wrong data", "has the key 1 of type int"),
    ],
)
async def test_tasks_that_cannot_be_listed_are_a_wrong_setting(single, split, message) -> None:
    with pytest.raises(ConfigError, match=message):
        await single.tasks(split, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RaisesAtStart", r"cannot be constructed: LookupError: no server takes \*\*\*"),
        ("ExitsAtStart", "ended with exit code 7 while the environment was .*printed: cannot go on"),
        pytest.param(
            "HogsAtStart", rf"more than {MEMORY_MIB} .*memory_mib.* while the environment was", marks=linux_only
        ),
        ("HangsAtStart", "was not imported and constructed within 0.25 s"),
        ("Nothing", "has no 'Nothing'; it defines"),
    ],
)
async def test_an_environment_that_cannot_start_is_a_wrong_setting(name, message) -> None:
    arguments = {"key": "sk-do-not-print"} if name == "RaisesAtStart" else {}
    start_s = VERY_SHORT_S if name == "HangsAtStart" else LONG_S
    with pytest.raises(ConfigError, match=message):
        async with pool(name, arguments=arguments, start_s=start_s, memory_mib=MEMORY_MIB):
            pass


async def test_processes_that_only_die_are_given_up(tmp_path) -> None:
    async with pool("DiesAgain", arguments={"first": str(tmp_path / "first")}, count=1, max_restarts=3) as environment:
        with pytest.raises(EnvironmentFailedError, match="exit code 3"):
            await environment.messages(Task("t", {"do": "exit"}))
        with pytest.raises(EnvironmentFailedError, match=r"died 4 times in a row .*exit code 5") as given_up:
            await environment.messages(TASK)
        assert (given_up.value.reason, given_up.value.culprit) == (Reason.GIVEN_UP, False)


async def test_a_flood_of_output_is_bounded_in_the_log_and_blocks_nothing(single) -> None:
    with structlog.testing.capture_logs() as logs:
        assert await single.score(TASK, ["flood", "a"]) == [5.0, 1.0]
        await until(lambda: any("were left out" in entry.get("text", "") for entry in logs) or len(logs) > 100)
    printed = [entry for entry in logs if entry["event"] == "environment prints"]
    assert 0 < len(printed) < 1000


@linux_only
@pytest.mark.parametrize("word", ["fork bomb", "spawn"])
async def test_a_killed_process_takes_along_what_it_started(hasty, word) -> None:
    (group,) = await hasty.score(TASK, ["pid"])
    assert of_group(int(group))
    with pytest.raises(EnvironmentFailedError, match="did not end"):
        await hasty.messages(Task("t", {"do": word}))
    await until(lambda: not of_group(int(group)))


@linux_only
async def test_a_process_that_hangs_takes_along_what_it_started_in_another_session(hasty) -> None:
    (parent,) = await hasty.score(TASK, ["pid"])
    assert await hasty.score(TASK, ["start in a session without variables"]) == [36.0]
    mark = f"of-{parent:.0f}"
    await until(lambda: processes_with(mark))
    with pytest.raises(EnvironmentFailedError, match="did not end"):
        await hasty.messages(Task("t", {"do": "sleep"}))
    await until(lambda: not processes_with(mark))


@linux_only
async def test_a_daemon_ends_with_the_process_that_started_it_or_at_the_end_of_the_run() -> None:
    async with pool("Single", count=1, score_retries=0) as environment:
        (parent,) = await environment.score(TASK, ["pid"])
        assert await environment.score(TASK, ["start a daemon and exit"]) == [None]
        await until(lambda: not processes_with(f"of-{parent:.0f}"))
        (parent,) = await environment.score(TASK, ["pid"])
        await environment.score(TASK, ["start a daemon"])
        mark = f"of-{parent:.0f}"
        assert processes_with(mark)
    await until(lambda: not processes_with(mark))


@linux_only
async def test_a_kill_that_the_end_of_the_run_cuts_off_leaves_nothing() -> None:
    async with asyncio.timeout(LONG_S):
        environment = await pool("Single", count=1, call_s=SHORT_S).__aenter__()
        (parent,) = await environment.score(TASK, ["pid"])
        hanging = asyncio.create_task(environment.messages(Task("t", {"do": "spawn in a session"})))
        mark = f"of-{parent:.0f}"
        await until(lambda: processes_with(mark))
        (worker,) = environment._lives
        await worker.ended.wait()  # and is about to be killed
        ending = asyncio.create_task(environment.__aexit__())
        await asyncio.sleep(0)
        ending.cancel()
        hanging.cancel()
        await asyncio.gather(ending, hanging, return_exceptions=True)
        await until(lambda: not processes_with(mark) and not of_group(int(parent)))


async def test_a_fork_that_comes_back_answers_once(single) -> None:
    assert await single.score(TASK, ["fork and return"]) == [1.0]
    assert await single.score(TASK, ["a"]) == [1.0]


async def test_processes_get_no_secrets_that_are_not_named(monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "x")
    monkeypatch.setenv("ANOTHER_TOKEN", "y")
    async with pool("Single", count=1, variables=["JUDGE_API_KEY"]) as environment:
        assert await environment.score(TASK, ["secret"]) == [1.0]


async def test_more_processes_are_started_while_calls_wait() -> None:
    async with pool("Single", count=2) as environment:
        hanging = asyncio.create_task(environment.score(TASK, ["sleep"]))
        assert await environment.score(TASK, ["a"]) == [1.0], "in the second process"
        hanging.cancel()


async def test_a_call_whose_caller_left_still_ends_its_process_when_it_hangs(hasty) -> None:
    hanging = asyncio.create_task(hasty.messages(Task("t", {"do": "loop"})))
    await asyncio.sleep(0)  # it is sent
    hanging.cancel()
    async with asyncio.timeout(LONG_S):
        assert await hasty.score(TASK, ["a"]) == [1.0]


async def test_episodes_keep_their_state_and_are_forgotten_at_their_end(several) -> None:
    async with several.episode(TASK, 5) as one, several.episode(TASK, 100) as other:
        assert one.messages == [{"role": "user", "content": "go"}]
        assert (await one.step("ab")).messages[0]["content"] == "7"
        assert (await other.step("abc")).messages[0]["content"] == "103"
        last = await one.step("end")
        assert (last.done, last.reward, last.metrics) == (True, 1.0, {"n": 1.0})
    async with several.episode(TASK, 0) as third:
        assert (await third.step("open")).reward == 1.0, "the others were closed"


async def test_a_reset_whose_caller_left_leaves_no_episode(several) -> None:
    opening = asyncio.create_task(several.episode(TASK, 0).__aenter__())
    await asyncio.sleep(0)
    opening.cancel()
    async with several.episode(TASK, 0) as episode:
        assert (await episode.step("open")).reward == 1.0


async def test_the_culprit_of_a_death_fails_and_the_other_episodes_are_replayed(several) -> None:
    async with (
        several.episode(Task("poison", {"do": ""}), 0) as culprit,
        several.episode(TASK, 1) as innocent,
        several.episode(TASK, 2) as waiting,
    ):
        assert (await innocent.step("abc")).messages[0]["content"] == "4"
        outcomes = await asyncio.gather(culprit.step("kill"), waiting.step("ab"), return_exceptions=True)
        assert isinstance(outcomes[0], EnvironmentFailedError)
        assert (outcomes[0].reason, outcomes[0].task_id, outcomes[0].culprit) == (Reason.DIED, "poison", True)
        assert "SIGKILL" in str(outcomes[0])
        assert outcomes[1].messages[0]["content"] == "4"
        assert (await innocent.step("de")).messages[0]["content"] == "6"


async def test_an_episode_that_cannot_be_replayed_has_to_begin_again() -> None:
    async with (
        pool("Several", count=1, arguments={"forgetful": True}) as environment,
        environment.episode(TASK, 0) as culprit,
        environment.episode(TASK, 0) as innocent,
    ):
        await innocent.step("a")
        with pytest.raises(EnvironmentFailedError):
            await culprit.step("exit")
        with pytest.raises(ReplayDiffersError, match="step 1 answered otherwise when it was replayed"):
            await innocent.step("b")


async def test_of_several_calls_in_threads_the_one_that_kills_is_found() -> None:
    async with pool("Single", count=1, calls=4) as environment:
        words = ["a", "exit", "bb", "ccc"]
        outcomes = await asyncio.gather(*(environment.score(Task(word), [word]) for word in words))
        assert outcomes == [[1.0], [None], [2.0], [3.0]]
    async with pool("Several", count=1, calls=4) as environment, contextlib.AsyncExitStack() as stack:
        episodes = [await stack.enter_async_context(environment.episode(Task(word), 0)) for word in words]
        steps = (episode.step(word) for episode, word in zip(episodes, words, strict=True))
        found = await asyncio.gather(*steps, return_exceptions=True)
        assert [isinstance(each, EnvironmentFailedError) for each in found] == [False, True, False, False]
        assert found[1].culprit


async def test_a_reward_that_is_no_number_is_an_error_of_the_step(several) -> None:
    async with several.episode(TASK, 0) as episode:
        with pytest.raises(EnvironmentFailedError, match="could not convert string to float"):
            await episode.step("wrong reward")


async def test_coroutines_run_side_by_side_and_one_that_is_late_is_cancelled_alone() -> None:
    async with pool("Coroutines", count=1, call_s=VERY_SHORT_S) as environment:
        (one,), (other,) = await asyncio.gather(environment.score(TASK, ["a"]), environment.score(TASK, ["b"]))
        assert one == other, "one process"
        with pytest.raises(EnvironmentFailedError, match="did not end"):
            await environment.messages(Task("t", {"do": "hang"}))
        assert await environment.score(TASK, ["c"]) == [one], "it was not killed for that"
        with pytest.raises(EnvironmentFailedError, match="did not end"):
            await environment.messages(Task("t", {"do": "loop"}))
        assert environment.failures == {Reason.HUNG: 2}


async def test_a_plain_method_beside_coroutines_runs_in_a_thread_and_costs_its_process_when_it_hangs() -> None:
    async with pool("HalfPlain", count=1, call_s=VERY_SHORT_S) as environment:
        assert await environment.score(TASK, ["a", "thread"]) == [1.0, 0.0]
        (process,) = await environment.score(TASK, ["pid"])
        with pytest.raises(EnvironmentFailedError, match="did not end"):
            await environment.messages(Task("t", {"do": "sleep"}))
        assert environment.failures == {Reason.HUNG: 1}
        assert await environment.score(TASK, ["pid"]) != [process]


async def test_a_coroutine_where_no_loop_runs_is_an_error_with_the_remedy() -> None:
    async with pool("HalfCoroutine", count=1) as environment, environment.episode(TASK, 0) as episode:
        with pytest.raises(EnvironmentFailedError, match="write tasks or reset as `async def` too"):
            await episode.step("a")


async def test_answers_are_compared_as_text_or_as_mathematics() -> None:
    assert exact_reward(" 12\n", "12") == 1.0
    assert exact_reward("12.", "12") == 0.0
    assert math_reward("so it is \\boxed{\\frac{1}{2}}", "0.5") == 1.0
    assert math_reward("so it is \\boxed{3}", "0.5") == 0.0
