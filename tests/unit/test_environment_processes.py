"""Environments that hang, die, fill the memory, flood the log or return nonsense cost their own task and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import pytest_asyncio
import structlog
from prometheus_client import REGISTRY
from simulated_clock import SimulatedClock

from sluice.clock import CLOCK, Clock
from sluice.config import ConfigError
from sluice.environments.base import Task
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.episode import ReplayDiffersError
from sluice.environments.processes import SCORE_S, EnvironmentProcesses, Restarts, ScoringTime
from sluice.environments.rewards import exact_reward, math_reward
from sluice.environments.worker import End, EnvironmentFailedError, Reason

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILE = Path(__file__).parent / "misbehaving_environment.py"
TASK = Task("only", {"do": ""})
LIMIT_S = 300.0
"""Limit of calls and starts. The machine's clock never gets there; the tests of limits have a clock of their own."""

MEMORY_MIB = 150

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def pool(name: str, *, arguments=MappingProxyType({}), clock: Clock = CLOCK, **settings) -> EnvironmentProcesses:
    config = EnvironmentProcessesConfig(**{"call_s": LIMIT_S, "score_s": LIMIT_S, **settings})
    return EnvironmentProcesses(f"{FILE}:{name}", dict(arguments), config, (LIMIT_S, "start_s"), clock=clock)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def single() -> AsyncIterator[EnvironmentProcesses]:
    async with pool("Single", count=1, max_restarts=1000) as environment:
        yield environment


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest_asyncio.fixture(loop_scope="module")
async def timed(clock: SimulatedClock) -> AsyncIterator[EnvironmentProcesses]:
    """Has the test's clock, and gives up completions at once that it cannot score."""
    async with pool("Single", count=1, score_retries=0, memory_mib=MEMORY_MIB, clock=clock) as environment:
        yield environment


async def late(clock: SimulatedClock, call: asyncio.Future[Any]) -> None:
    """Let a call be late, and time pass until its process has ended."""
    await clock.advance(LIMIT_S)
    await clock.until(call.done, step_s=0.1)


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as found:
        yield found


def printed(logs: list[Any], text: str = "") -> list[str]:
    """Return the lines of the environment that have a text in them."""
    return [entry["text"] for entry in logs if entry["event"] == "environment prints" and text in entry["text"]]


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
    await SimulatedClock().until(condition)


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


async def test_what_went_wrong_in_scoring_is_logged_once_for_a_group(single, logs) -> None:
    assert await single.score(TASK, ["raise", "a", "raise", "nan"]) == [None, 1.0, None, None]
    raised, odd = [each for each in logs if each["event"] == "scoring failed"]
    assert (raised["task"], raised["missing"], raised["completions"]) == (TASK.task_id, 3, 4)
    assert raised["problem"].startswith("KeyError: 'no such key'\n")
    assert "misbehaving_environment.py" in raised["problem"]
    assert "nan" in odd["problem"]


@linux_only
@pytest.mark.parametrize("word", ["hog", "hog shared memory"])
async def test_a_process_that_needs_too_much_memory_is_killed(timed, clock, logs, word) -> None:
    scoring = asyncio.create_task(timed.score(TASK, [word]))
    await until(lambda: printed(logs, "has the memory"))
    assert not scoring.done()
    await clock.advance(1.0)  # to the next look at the memory
    assert await scoring == [None]
    assert timed.failures == {Reason.MEMORY: 1, "missing": 1}
    assert await timed.score(TASK, ["a"]) == [1.0]


@linux_only
async def test_memory_that_processes_share_counts_once(timed, clock, logs) -> None:
    (process,) = await timed.score(TASK, ["pid"])
    sharing = asyncio.create_task(timed.score(TASK, ["share with forks"]))
    await until(lambda: printed(logs, "shares the memory"))
    waits = clock.waits
    for _ in range(2):
        await clock.advance(1.0)
        await until(lambda: clock.waits == waits)  # the look at the memory, in a thread, is over
    os.kill(int(process), signal.SIGUSR1)
    assert await sharing == [16.0], "it and its forks have 100 MiB of 150"


@pytest.mark.slow
async def test_calls_that_hang_cost_their_own_process_whether_they_hold_the_gil_or_not(clock, logs) -> None:
    call_s = 3600.0  # more than the steps below take
    async with pool("Single", count=4, call_s=call_s, clock=clock) as environment:
        hanging = [Task("t", {"do": word}) for word in ("loop", "regex", "hold the GIL", "sleep")]
        calls = [*map(environment.messages, hanging), environment.score(TASK, ["a"])]
        outcomes = asyncio.gather(*calls, return_exceptions=True)
        await clock.until(lambda: len(printed(logs, "does")) == 4, step_s=0.05)  # until each has its process
        await clock.advance(call_s)
        *hung, rewards = await outcomes
        assert [each.reason for each in hung] == [Reason.HUNG] * 4
        assert rewards == [1.0]
        assert environment.failures == {Reason.HUNG: 4}


async def test_the_loop_goes_on_while_a_process_hangs_and_its_end_prints_where(timed, clock, logs) -> None:
    hanging = asyncio.create_task(timed.messages(Task("poison", {"do": "regex"})))
    await until(lambda: printed(logs, "does regex"))
    assert not hanging.done()
    await clock.advance(LIMIT_S)
    with pytest.raises(
        EnvironmentFailedError, match=r"messages of task poison did not end within 300 s .*call_s"
    ) as hung:
        await hanging
    assert (hung.value.reason, hung.value.task_id, hung.value.culprit) == (Reason.HUNG, "poison", True)
    assert printed(logs, "misbehaving_environment.py")
    assert printed(logs, "in act")


async def test_an_error_carries_its_type_its_message_and_the_lines_of_the_environment_alone(single) -> None:
    with pytest.raises(EnvironmentFailedError, match="messages of task t raised KeyError: 'no such key'") as raised:
        await single.messages(Task("t", {"do": "raise"}))
    assert raised.value.reason == Reason.RAISED
    assert 'misbehaving_environment.py", line' in raised.value.message
    assert 'raise KeyError("no such key")' in raised.value.message
    assert "child.py" not in raised.value.message


UNFIT = {"text", "field", "number", "nothing"}
"""Answers that are plain data, but not messages."""


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("decimal", r"value\[0\]\.weight\[0\] is of type Decimal"),
        ("large", "at most 64 MiB can be sent"),
        ("itself", "levels deep"),
        ("text", r"messages\(task\): give a list of messages such as .*, not 'what is it\?'"),
        ("field", r"messages of task t: a message of the environment has the unknown fields thinking; known"),
        ("number", "messages of task t: field content of a message is int, not text$"),
        ("nothing", r"messages of task t: messages\(task\) gave no message"),
    ],
)
async def test_messages_that_cannot_be_used_are_an_error_that_says_where(single, word, message) -> None:
    with pytest.raises(EnvironmentFailedError, match=message) as failed:
        await single.messages(Task("t", {"do": word}))
    assert failed.value.reason == (Reason.MESSAGES if word in UNFIT else Reason.RAISED)
    assert await single.score(TASK, ["a"]) == [1.0]


async def test_messages_of_an_episode_that_cannot_be_used_are_what_it_raised_since_the_task_alone_is_not_at_fault(
    several,
) -> None:
    with pytest.raises(EnvironmentFailedError, match="reset of task t raised ValueError: field content") as failed:
        async with several.episode(Task("t", {"do": "unfit"}), 0):
            pass
    assert failed.value.reason == Reason.RAISED
    async with several.episode(TASK, 0) as episode:
        with pytest.raises(
            EnvironmentFailedError, match="step of task only raised ValueError: messages of a turn"
        ) as failed:
            await episode.step("unfit")
    assert failed.value.reason == Reason.RAISED


async def test_a_task_that_is_not_plain_data_fails_its_call_and_harms_no_process(timed, clock) -> None:
    (process,) = await timed.score(TASK, ["pid"])
    with pytest.raises(EnvironmentFailedError, match=r"cannot be called: arguments.task.data.do is of type object"):
        await timed.messages(Task("t", {"do": object()}))
    await clock.advance(2 * LIMIT_S)  # no time limit runs on for it
    assert await timed.score(TASK, ["pid"]) == [process]


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
        ("Nothing", "has no 'Nothing'; it defines"),
    ],
)
async def test_an_environment_that_cannot_start_is_a_wrong_setting(clock, name, message) -> None:
    arguments = {"key": "sk-do-not-print"} if name == "RaisesAtStart" else {}
    with pytest.raises(ConfigError, match=message):
        async with pool(name, arguments=arguments, clock=clock):
            pass


@pytest.mark.parametrize(
    ("name", "sign", "after_s", "message"),
    [
        pytest.param(
            *("HogsAtStart", "has the memory", 1.0),
            rf"more than {MEMORY_MIB} .*memory_mib.* while the environment was",
            marks=linux_only,
        ),
        ("HangsAtStart", "does sleep", LIMIT_S, "was not imported and constructed within 300 s"),
    ],
)
async def test_an_environment_whose_start_has_no_end_is_a_wrong_setting(  # noqa: PLR0917 - parameters of the test
    clock, logs, name, sign, after_s, message
) -> None:
    starting = asyncio.create_task(pool(name, memory_mib=MEMORY_MIB, clock=clock).__aenter__())
    await until(lambda: printed(logs, sign))
    await clock.advance(after_s)
    with pytest.raises(ConfigError, match=message):
        await starting


@pytest.mark.slow
async def test_processes_that_only_die_are_given_up(tmp_path) -> None:
    async with pool("DiesAgain", arguments={"first": str(tmp_path / "first")}, count=1, max_restarts=3) as environment:
        with pytest.raises(EnvironmentFailedError, match="exit code 3"):
            await environment.messages(Task("t", {"do": "exit"}))
        with pytest.raises(EnvironmentFailedError, match=r"died 4 times in a row .*exit code 5") as given_up:
            await environment.messages(TASK)
        assert (given_up.value.reason, given_up.value.culprit) == (Reason.GIVEN_UP, False)
        (waits,) = environment.waits_for()
        assert "given up" in waits


@pytest.mark.slow
async def test_hung_calls_alone_never_end_the_environment(clock, logs) -> None:
    async with pool("Single", count=1, score_retries=0, max_restarts=2, clock=clock) as environment:
        for number in range(6):
            hanging = asyncio.create_task(environment.score(Task(str(number)), ["sleep"]))
            await until(lambda number=number: len(printed(logs, "does sleep")) > number)
            await late(clock, hanging)
            assert await hanging == [None]
        assert environment.failures == {Reason.HUNG: 6, "missing": 6}, "each is charged to its task"
        assert environment.processes_ended == {Reason.HUNG: 6}
        assert await environment.score(TASK, ["a"]) == [1.0]


@pytest.mark.slow
async def test_calls_that_kill_their_process_never_end_the_environment() -> None:
    async with pool("Single", count=1, score_retries=0, max_restarts=2) as environment:
        assert await environment.score(TASK, ["exit", "kill", "segfault", "exit"]) == [None] * 4
        assert environment.processes_ended == {Reason.DIED: 5}
        assert await environment.score(TASK, ["a"]) == [1.0]


async def test_calls_and_restarts_are_counted_by_environment_and_outcome() -> None:
    def counted(metric: str, **labels: str) -> float:
        labels = {"environment": environment.name, **labels}
        return REGISTRY.get_sample_value(f"sluice_environment_{metric}", labels) or 0.0

    async with pool("Single", count=1, score_retries=0, max_restarts=2) as environment:
        names = [("calls_total", {"outcome": "ok"}), ("calls_total", {"outcome": "died"})]
        names += [("call_seconds_count", {}), ("processes_restarts_total", {})]
        before = [counted(name, **labels) for name, labels in names]
        assert await environment.score(TASK, ["a"]) == [1.0]
        assert await environment.score(TASK, ["exit"]) == [None]
        assert list(environment.waits_for()) == []
        after = [counted(name, **labels) for name, labels in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 2, 1]


async def test_deaths_that_a_call_is_charged_with_do_not_count_and_do_not_delay() -> None:
    restarts = Restarts(2)
    assert [restarts.died(charged=True) for _ in range(100)] == [0.0] * 100
    assert [restarts.died(charged=False) for _ in range(3)] == [0.0, 0.1, None]


async def test_deaths_without_a_call_at_fault_count_until_a_call_is_answered() -> None:
    restarts = Restarts(2)
    for _ in range(5):
        assert restarts.died(charged=False) == 0.0
        assert restarts.died(charged=True) == 0.0
        assert restarts.died(charged=False) == 0.1
        restarts.answered()
    assert Restarts(0).died(charged=False) is None


async def test_the_time_to_score_a_group_follows_from_the_environment() -> None:
    assert ScoringTime(0.0).limit_s(8) == SCORE_S
    assert ScoringTime(30.0).limit_s(8) == 30.0
    assert ScoringTime(0.0, each_s=50.0).limit_s(8) == 8 * 50.0 + SCORE_S
    assert ScoringTime(0.0, each_s=50.0, together=True).limit_s(8) == 50.0 + SCORE_S
    assert ScoringTime(1000.0, each_s=50.0).limit_s(8) == 1000.0
    assert ScoringTime(400.0, each_s=50.0).limit_s(9) == 460.0, "also where a group is larger than the settings say"
    assert [ScoringTime(399.0, each_s=50.0).too_short(count) for count in (7, 8)] == [False, True]
    assert not ScoringTime(0.0, each_s=50.0).too_short(1000)


async def test_an_environment_with_limits_of_its_own_is_not_killed_before_it_has_reached_them(clock, logs) -> None:
    async with pool("Limited", count=1, score_s=0.0, score_retries=0, clock=clock) as environment:
        scoring = asyncio.create_task(environment.score(TASK, ["sleep", "a", "b"]))
        await until(lambda: printed(logs, "does sleep"))
        await clock.advance(3 * 40.0 + SCORE_S - 1.0)
        assert not environment.processes_ended
        await clock.advance(1.0)
        await until(lambda: environment.processes_ended)
        scoring.cancel()
    assert environment.processes_ended == {Reason.HUNG: 1}


async def test_a_time_for_a_group_that_the_environment_may_exceed_is_refused_with_the_numbers() -> None:
    config = EnvironmentProcessesConfig(score_s=100.0)
    for group_size, refused in ((2, False), (3, True)):
        environment = EnvironmentProcesses(
            f"{FILE}:Limited", {}, config, (LIMIT_S, "start_s"), "t", group_size=group_size
        )
        if not refused:
            async with environment:
                continue
        with pytest.raises(
            ConfigError, match=r"t\.score_s is 100, .*120 s for a group: 3 completions one after the other, up to 40 s"
        ):
            await environment.__aenter__()


@pytest.mark.parametrize("seconds", ["soon", -1.0, None])
async def test_an_environment_whose_limit_is_no_number_of_seconds_is_a_wrong_setting(seconds) -> None:
    with pytest.raises(ConfigError, match=r"scoring_s is .*: give seconds"):
        async with pool("Limited", arguments={"scoring_s": seconds}):
            pass


async def test_a_flood_of_output_is_bounded_in_the_log_and_blocks_nothing(clock, logs) -> None:
    async with pool("Single", count=1, clock=clock) as environment:
        assert await environment.score(TASK, ["flood", "a"]) == [5.0, 1.0]
    *passed, last = printed(logs)  # up to the end of the process, in no time of the clock
    assert passed == ["does flood", *["x" * 80] * 99], "those of ten seconds"
    assert last.startswith("(99901 lines were left out")


@linux_only
@pytest.mark.parametrize(("word", "processes"), [("fork bomb", 32), ("spawn", 2)])
async def test_a_killed_process_takes_along_what_it_started(timed, clock, word, processes) -> None:
    (group,) = await timed.score(TASK, ["pid"])
    hanging = asyncio.create_task(timed.messages(Task("t", {"do": word})))
    await until(lambda: len(of_group(int(group))) == processes)
    await late(clock, hanging)
    with pytest.raises(EnvironmentFailedError, match="did not end"):
        await hanging
    await until(lambda: not of_group(int(group)))


@linux_only
async def test_a_process_that_hangs_takes_along_what_it_started_in_another_session(timed, clock) -> None:
    (parent,) = await timed.score(TASK, ["pid"])
    assert await timed.score(TASK, ["start in a session without variables"]) == [36.0]
    mark = f"of-{parent:.0f}"
    await until(lambda: processes_with(mark))
    hanging = asyncio.create_task(timed.messages(Task("t", {"do": "sleep"})))
    await late(clock, hanging)
    with pytest.raises(EnvironmentFailedError, match="did not end"):
        await hanging
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
async def test_a_kill_that_the_end_of_the_run_cuts_off_leaves_nothing(clock) -> None:
    environment = await pool("Single", count=1, clock=clock).__aenter__()
    (parent,) = await environment.score(TASK, ["pid"])
    hanging = asyncio.create_task(environment.messages(Task("t", {"do": "spawn in a session"})))
    mark = f"of-{parent:.0f}"
    await until(lambda: processes_with(mark))
    (worker,) = environment._lives
    limit = asyncio.create_task(clock.advance(LIMIT_S))
    await worker.ended.wait()  # and is about to be killed
    ending = asyncio.create_task(environment.__aexit__())
    await asyncio.sleep(0)
    ending.cancel()
    hanging.cancel()
    await asyncio.gather(ending, hanging, limit, return_exceptions=True)
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


async def test_a_call_whose_caller_left_still_ends_its_process_when_it_hangs(timed, clock) -> None:
    hanging = asyncio.create_task(timed.messages(Task("t", {"do": "loop"})))
    await asyncio.sleep(0)  # it is sent
    hanging.cancel()
    scoring = asyncio.create_task(timed.score(TASK, ["a"]))
    await clock.advance(LIMIT_S)
    assert await scoring == [1.0]
    assert timed.processes_ended == {Reason.HUNG: 1}


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


@pytest.mark.slow
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
        with pytest.raises(EnvironmentFailedError, match=r"the reward of a turn is .*much.* \(str\), not a number"):
            await episode.step("wrong reward")


async def test_coroutines_run_side_by_side_and_one_that_is_late_is_cancelled_alone(clock, logs) -> None:
    async with pool("Coroutines", count=1, clock=clock) as environment:
        (one,), (other,) = await asyncio.gather(environment.score(TASK, ["a"]), environment.score(TASK, ["b"]))
        assert one == other, "one process"
        waiting = asyncio.create_task(environment.messages(Task("t", {"do": "wait"})))
        await clock.advance(LIMIT_S)
        with pytest.raises(EnvironmentFailedError, match=r"did not end within 300 s .*cancelled"):
            await waiting
        assert await environment.score(TASK, ["c"]) == [one], "it was not killed for that"
        looping = asyncio.create_task(environment.messages(Task("t", {"do": "loop"})))
        await until(lambda: printed(logs, "does loop"))
        await clock.advance(2 * LIMIT_S)
        with pytest.raises(EnvironmentFailedError, match="did not end within 300 s"):
            await looping
        assert environment.failures == {Reason.HUNG: 2}
        assert environment.processes_ended == {Reason.HUNG: 1}


async def test_a_coroutine_that_cancels_itself_has_raised() -> None:
    async with pool("Coroutines", count=1) as environment:
        with pytest.raises(EnvironmentFailedError, match="raised CancelledError: by a library") as raised:
            await environment.messages(Task("t", {"do": "cancel itself"}))
        assert raised.value.reason == Reason.RAISED


async def test_a_plain_method_beside_coroutines_runs_in_a_thread_and_costs_its_process_when_it_hangs(
    clock, logs
) -> None:
    async with pool("HalfPlain", count=1, clock=clock) as environment:
        assert await environment.score(TASK, ["a", "thread"]) == [1.0, 0.0]
        (process,) = await environment.score(TASK, ["pid"])
        hanging = asyncio.create_task(environment.messages(Task("t", {"do": "sleep"})))
        await until(lambda: printed(logs, "does sleep"))
        await clock.advance(2 * LIMIT_S)
        with pytest.raises(EnvironmentFailedError, match="did not end"):
            await hanging
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
