"""The code of an environment runs in separate processes: tasks, messages, reset, step and score.

A process that hangs, dies or needs too much memory is killed, together with all processes that it started, and replaced. The call at fault
fails with an `EnvironmentFailedError` that names its task. Other calls are retried, and other episodes of that process are replayed in
another process: reset with the same seed, then the same steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import structlog
from prometheus_client import Counter as CounterMetric
from prometheus_client import Histogram

from sluice.clock import CLOCK, Clock
from sluice.config import ConfigError
from sluice.environments.base import Message, Score, Task
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.episode import MOST_LOSSES, OpenEpisode, task_fields
from sluice.environments.framing import NotPlainError
from sluice.environments.message_fields import UnfitMessagesError
from sluice.environments.stored_tasks import StoredTasks
from sluice.environments.worker import (
    MARK,
    Call,
    End,
    EnvironmentFailedError,
    Reason,
    Worker,
    import_path,
    passed_variables,
)
from sluice.supervise.watchdog import Watchdog
from sluice.tasks import discard_outcome, settle

CALLS = CounterMetric(
    "sluice_environment_calls",
    "Calls of an environment's code, by outcome: ok, the reason of a failure, lost with its process, or cancelled by the caller.",
    ("environment", "outcome"),
)
CALL_SECONDS = Histogram(
    "sluice_environment_call_seconds",
    "Time of a call of an environment's code, from its request to its answer, waiting for a process included.",
    ("environment",),
    buckets=(0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800),
)
RESTARTS = CounterMetric(
    "sluice_environment_processes_restarts",
    "Processes of an environment that took the place of one that ended.",
    ("environment",),
)

# `labels` would take as long as all other bookkeeping of a short call.
_calls, _seconds = cache(CALLS.labels), cache(CALL_SECONDS.labels)

log = structlog.get_logger(__name__)

_MOST_PROCESSES = 4
"""Maximum number of processes if the settings name none."""

_MOST_SCORINGS = 4096
"""Maximum number of scoring durations to keep until somebody takes them."""

_COROUTINES = 64
"""Calls at a time in a process whose environment has coroutine methods, if the settings name no number."""

_PATIENCE_S = 0.05
"""Seconds that calls wait before another process is started for them: about the time that its start takes."""

SCORE_S = 10.0
"""Seconds to score a group if the settings name none. For an environment with its own limits: seconds in addition to these."""

_EXTRA_S = 1.0
"""Seconds that a process with coroutine methods gets to cancel a late call, before the process is killed."""

_EXIT_S = 1.0
"""Seconds that idle processes get to end by themselves when the run ends."""

_MEMORY_POLL_S = (0.25, 1.0)
"""Minimum and maximum seconds between two checks of the memory of the processes."""

_FASTEST_MIB_PER_S = 8192.0
"""Rate at which four processes that allocate in a loop take memory."""

_MEMORY_SHARE = 0.1
"""Maximum share of a core that these checks may take. They take longer for processes with much memory."""


def memory_look_s(room_mib: float, took_s: float) -> float:
    """Return the seconds until the next check of the memory of processes, the largest of which is `room_mib` below its limit. Pure.

    A process that allocates in a loop exceeds its limit by at most 0.5 GiB until then, unless the check itself is slow: the last one took
    `took_s`.
    """
    least, most = _MEMORY_POLL_S
    return max(least, min(most, room_mib / _FASTEST_MIB_PER_S), took_s / _MEMORY_SHARE)


@dataclass(frozen=True, slots=True)
class ScoringTime:
    """How long a group may be scored. Pure.

    Args:
        score_s: Seconds for a group, from the settings; 0 if they leave it to the environment.
        each_s: Maximum seconds for one completion, after which the environment itself ends its scoring; 0 if it has no such limit.
        together: Whether the completions of a group are scored at the same time.
    """

    score_s: float
    each_s: float = 0.0
    together: bool = False

    def own_s(self, completions: int) -> float:
        """Return the seconds after which the environment itself has ended the scoring of `completions` completions; 0 if it has no limit."""
        return self.each_s if self.together else self.each_s * completions

    def limit_s(self, completions: int) -> float:
        """Return the seconds after which a process that scores `completions` completions is killed."""
        own_s = self.own_s(completions)
        return max(self.score_s or SCORE_S, own_s + SCORE_S if own_s else 0.0)

    def too_short(self, completions: int) -> bool:
        """Return whether the settings give less time than the environment may take."""
        return 0 < self.score_s < self.own_s(completions)


class Restarts:
    """Decides when another process may be started after one that died. Pure.

    If the call at fault is known, a death is charged to it: the call fails, and its task can be put in quarantine. Other deaths, such as
    deaths at start, are counted until a call is answered, because an environment that cannot run must end.

    Args:
        most: Maximum number of counted deaths in a row. After more, no process is started.
    """

    def __init__(self, most: int) -> None:
        self._most, self._in_a_row = most, 0

    def answered(self) -> None:
        """Note that a process answered a call."""
        self._in_a_row = 0

    def died(self, *, charged: bool) -> float | None:
        """Return the seconds until the next start; None to give up.

        Args:
            charged: Whether a known call is at fault and fails.
        """
        if charged:
            return 0.0
        self._in_a_row += 1
        if self._in_a_row > self._most:
            return None
        return 0.0 if self._in_a_row == 1 else min(0.1 * 2.0 ** (self._in_a_row - 2), 10.0)


class EnvironmentProcesses:
    """An environment whose code runs in separate processes. Use it as an async context.

    Args:
        reference: An installed id, ``module:Attr`` or ``path/to/env.py:Attr``.
        arguments: Keyword arguments of the environment's class or function.
        start_limit: Seconds to construct the environment, and to list its tasks; and the name of that setting.
        section: Name of the table of `config` in the settings, for messages.
        group_size: Completions of a group, to check that `score_s` is not too short for an environment with limits of its own.
        clock: Time of calls, starts and memory checks.

    Attributes:
        name: The environment's name. It and the next five attributes are known once the context is entered.
        single_turn: Whether it poses questions and scores answers.
        multi_turn: Whether it opens episodes of several turns.
        poses: Whether it gives the messages with which an episode begins.
        scores: Whether it scores answers.
        plays: Whether it plays episodes itself, with a gateway as its model.
        failures: Number of failed calls by `Reason`; "missing" counts missing rewards.
        processes_ended: Number of processes that ended before the run did, by `Reason`, with or without a call at fault.
    """

    name = ""
    single_turn = multi_turn = poses = scores = plays = False

    def __init__(
        self,
        reference: str,
        arguments: Mapping[str, Any],
        config: EnvironmentProcessesConfig,
        start_limit: tuple[float, str],
        section: str = "orchestrator.environment_processes",
        *,
        group_size: int = 1,
        clock: Clock = CLOCK,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.processes_ended: Counter[str] = Counter()
        self._reference, self._arguments, self._config = reference, arguments, config
        self._start_s, self._start_setting = start_limit
        self._section, self._group_size = section, group_size
        self._clock = clock
        self._scoring = ScoringTime(config.score_s)
        self._scoring_s: deque[float] = deque(maxlen=_MOST_SCORINGS)
        self._most = config.count or min(os.cpu_count() or 1, _MOST_PROCESSES)
        self._coroutines = False
        self._numbers, self._process_numbers = itertools.count(1), itertools.count(1)
        self._starting = 0
        self._waiting: deque[Call] = deque()
        self._workers: list[Worker] = []
        self._lives: dict[Worker, asyncio.Task[None]] = {}
        self._restarts = Restarts(config.max_restarts)
        self._start_at = 0.0
        self._look_again: asyncio.Task[None] | None = None
        self._given_up = ""
        self._closing = False

    async def __aenter__(self) -> Self:
        """Start the first process and let it construct the environment.

        Raises:
            ConfigError: if the environment cannot be constructed.
        """
        self._loop = asyncio.get_running_loop()
        self._described: asyncio.Future[None] = self._loop.create_future()
        self._mark = secrets.token_hex(8)
        self._watchdog = await Watchdog.start(grace_s=0.0, mark=f"{MARK}={self._mark}")
        self._memory = asyncio.create_task(self._watch_memory(), name="memory of the environment")
        try:
            self._start_one()
            await self._described
            while self.multi_turn and not self.single_turn and len(self._lives) < self._most:
                self._start_one()  # at once, because episodes that begin in the first process stay there
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        """End the processes. Calls in progress are given up."""
        self._closing = True
        if self._look_again is not None:
            self._look_again.cancel()
        for task in (self._memory, *self._lives.values()):
            task.cancel()
        try:
            await settle(self._memory, *self._lives.values())
        finally:
            self._described.cancel()
            self._give_up("the run ends")
            await self._watchdog.stop()  # this kills processes that are left

    def waits_for(self) -> Iterator[str]:
        """Yield the reason if no call can be answered at the moment. Without calls no process is needed: the next call starts one."""
        if self._given_up:
            yield f"the environment {self.name}: it was given up, since its processes ended too often"
        elif self._waiting and not self._workers:
            yield f"a process of the environment {self.name}, which is started again"

    async def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the tasks of a split; the same seed gives the same tasks in the same order. If they are large, they are stored in a file.

        Raises:
            ConfigError: if the environment fails, or does not list them in time.
        """
        listing = str(next(self._numbers))
        arguments = {"listing": listing, "split": split, "seed": seed}
        tasks = StoredTasks()
        worker: Worker | None = None
        while True:
            try:
                page, worker = await self._call(
                    "tasks", "", arguments | {"start": len(tasks)}, (self._start_s, self._start_setting), worker
                )
            except EnvironmentFailedError as error:
                if error.reason == Reason.HUNG:
                    raise ConfigError(
                        f"environment {self.name} did not list the tasks of split {split} within {self._start_s:g} s: prepare its"
                        f" data before the run, or raise {self._start_setting}"
                    ) from error
                raise ConfigError(
                    f"environment {self.name} cannot list the tasks of split {split}: {error.message}"
                ) from error
            for fields in page["tasks"]:
                tasks.append(Task(**fields))
            if len(tasks) >= page["count"]:
                return tasks

    async def messages(self, task: Task) -> list[Message]:
        """Return the conversation up to where the assistant answers.

        Raises:
            EnvironmentFailedError: if the environment fails.
        """
        value, _ = await self._call("messages", task.task_id, {"task": task_fields(task)}, self._call_limit)
        return list(value)

    async def score(self, task: Task, completions: Sequence[str]) -> list[float | None]:
        """Return the rewards of some completions of a task; see `judge`."""
        return [each.reward for each in await self.judge(task, completions)]

    @property
    def failed_calls(self) -> int:
        """Number of calls that failed so far. A missing reward does not count."""
        return self.failures.total() - self.failures["missing"]

    def take_scoring_s(self) -> list[float]:
        """Return the seconds of each `judge` that ended since the last call, including the wait for a process; at most the last 4,096."""
        taken = list(self._scoring_s)
        self._scoring_s.clear()
        return taken

    async def judge(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """Return the scores of some completions of a task. A missing reward is None.

        Score all in one call. Score those that fail again, each in a separate call, so that one bad completion spoils no other.
        Log the problems once, at the end.

        Raises:
            EnvironmentFailedError: if no process of the environment is started any more.
        """
        problems: dict[str, str] = {}
        began = self._clock()
        together = await self._scored(task, completions, problems)
        alone = [place for place, score in enumerate(together) if score.reward is None]
        again = await asyncio.gather(
            *(self._scored_alone(task, completions[place], len(completions), problems) for place in alone)
        )
        for place, score in zip(alone, again, strict=True):
            together[place] = score
        self._scoring_s.append(self._clock() - began)
        missing = sum(score.reward is None for score in together)
        for problem, reason in problems.items():
            tell = log.warning if missing else log.info
            tell(
                "scoring failed",
                task=task.task_id,
                missing=missing,
                completions=len(completions),
                reason=reason,
                problem=problem,
            )
        return together

    async def _scored_alone(self, task: Task, completion: str, of: int, problems: dict[str, str]) -> Score:
        for _ in range(max(self._config.score_retries, int(of > 1))):
            (score,) = await self._scored(task, [completion], problems)
            if score.reward is not None:
                return score
        self.failures["missing"] += 1
        log.info("reward is missing", task=task.task_id)
        return _MISSING

    async def _scored(self, task: Task, completions: Sequence[str], problems: dict[str, str]) -> list[Score]:
        """Score completions in one call, and add each problem that occurs to `problems`."""
        limit = (self._scoring.limit_s(len(completions)), f"{self._section}.score_s")
        try:
            values, _ = await self._call(
                "score", task.task_id, {"task": task_fields(task), "completions": list(completions)}, limit
            )
        except EnvironmentFailedError as error:
            if error.reason == Reason.GIVEN_UP:
                raise
            problems[error.message] = error.reason
            return [_MISSING] * len(completions)
        raised = [value for value in values if "reward" not in value]
        if raised:
            self.failures[Reason.RAISED] += len(raised)
            problems.update((_text(value), Reason.RAISED) for value in raised)
        return [Score(**value) if "reward" in value else _MISSING for value in values]

    async def run(
        self, task_id: str, data: Mapping[str, Any], base_url: str, api_key: str, limit: tuple[float, str]
    ) -> object:
        """Let the environment play an episode itself, and return what it returned.

        Args:
            task_id: For messages.
            data: Data of the task.
            base_url: The gateway's base URL for OpenAI's libraries.
            api_key: Key of the episode's session.
            limit: Seconds, and the name of that setting.

        Raises:
            EnvironmentFailedError: if the environment fails.
        """
        value, _ = await self._call("run", task_id, {"data": data, "base_url": base_url, "api_key": api_key}, limit)
        return value

    @contextlib.asynccontextmanager
    async def episode(self, task: Task, seed: int) -> AsyncIterator[OpenEpisode]:
        """Begin an episode. At the end of the context its process forgets it.

        Raises:
            EnvironmentFailedError: if the environment fails.
        """
        episode = OpenEpisode(str(next(self._numbers)), self._call, self._call_limit, task, seed)
        try:
            await episode.begin()
            yield episode
        finally:
            if episode.worker is not None:
                self._forget(episode.worker, episode.name, task.task_id, closed=episode.done)

    @property
    def _call_limit(self) -> tuple[float, str]:
        return self._config.call_s, f"{self._section}.call_s"

    async def _call(
        self,
        method: str,
        task_id: str,
        arguments: Mapping[str, Any],
        limit: tuple[float, str],
        worker: Worker | None = None,
        *,
        alone: bool = False,
    ) -> tuple[Any, Worker]:
        """Call a method in `worker`, or in the process with the least to do.

        Returns:
            Its return value, and the process that ran it.

        Raises:
            EnvironmentFailedError: if it fails.
        """
        call = self._submit(method, task_id, arguments, limit, worker)
        call.alone = alone
        self._pump()
        outcome = "cancelled"
        try:
            value = await call.answer
            outcome = "ok"
        except EnvironmentFailedError as error:
            named = error.culprit or error.reason == Reason.GIVEN_UP
            outcome = error.reason.removeprefix("ENVIRONMENT_").lower() if named else "lost"
            if error.culprit:
                self.failures[error.reason] += 1
            raise
        finally:
            _calls(self.name, outcome).inc()
            _seconds(self.name).observe(self._clock() - call.since)
        if call.worker is None:
            raise RuntimeError("a call was answered by no process")
        return value, call.worker

    def _submit(
        self, method: str, task_id: str, arguments: Mapping[str, Any], limit: tuple[float, str], worker: Worker | None
    ) -> Call:
        call = Call(next(self._numbers), method, task_id, arguments, *limit, self._loop.create_future(), self._clock())
        if self._given_up:
            error = EnvironmentFailedError(Reason.GIVEN_UP, self._given_up, task_id, culprit=False)
            call.answer.set_exception(error)
        elif worker is None:
            self._waiting.append(call)
        elif worker.ended.is_set():
            call.answer.set_exception(self._lost_error(call, worker.end))
        else:
            worker.waiting.append(call)
        return call

    def _pump(self) -> None:
        """Give calls to processes that have room for them. Start a process if calls have waited for some time."""
        for worker in self._workers:
            while worker.waiting and self._runs(worker, worker.waiting[0]):
                worker.waiting.popleft()
        while self._waiting:
            call = self._waiting[0]
            live = [worker for worker in self._workers if not worker.ended.is_set()]
            free = [worker for worker in live if not worker.waiting and worker.can_run(call)]
            if not free and not (call.alone and live):
                break
            self._waiting.popleft()
            worker = min(free or live, key=lambda each: (len(each.running), each.episodes))
            if not (free and self._runs(worker, call)):
                worker.waiting.appendleft(call)  # it must run alone: nothing else may begin in this process before it
        self._grow()

    def _runs(self, worker: Worker, call: Call) -> bool:
        """Let a process run a call, if it can now. Return whether the call has left the queue."""
        if call.answer.done():  # nobody waits for it any more
            return True
        if not worker.can_run(call):
            return False
        try:
            worker.run(call, _EXTRA_S if self._coroutines else 0.0)
        except NotPlainError as error:
            problem = f"{call.name} cannot be called: {error}"
            call.answer.set_exception(EnvironmentFailedError(Reason.RAISED, problem, call.task_id))
        return True

    def _grow(self) -> None:
        """Start a process if calls have waited long enough. Otherwise check again when they will have."""
        queues = [queue for queue in (self._waiting, *(worker.waiting for worker in self._workers)) if queue]
        if not queues or self._starting or self._closing or self._given_up or len(self._lives) >= self._most:
            return
        due = max(min(queue[0].since for queue in queues) + (_PATIENCE_S if self._workers else 0.0), self._start_at)
        wait_s = due - self._clock()
        if wait_s <= 0:
            self._start_one()
        elif self._look_again is None:
            self._look_again = asyncio.create_task(self._look(wait_s), name="start of an environment process")

    async def _look(self, wait_s: float) -> None:
        await self._clock.sleep(wait_s)
        self._look_again = None
        self._pump()

    def _start_one(self) -> None:
        number = next(self._process_numbers)
        worker = Worker(number, f"{self._mark}.{number}.", self._watchdog, self._answered, self._clock)
        self._starting += 1
        life = asyncio.create_task(self._live(worker), name=f"environment process {worker.number}")
        self._lives[worker] = life
        life.add_done_callback(self._check_life)

    def _check_life(self, life: asyncio.Task[None]) -> None:
        """If the task of a process failed, give up, so that no call waits for that process."""
        if not life.cancelled() and (error := life.exception()) is not None:
            log.error("a process of the environment is lost by a defect", exc_info=error)
            self._give_up(f"a process of environment {self.name} was lost by a defect: {error!r}")
            if not self._described.done():
                self._described.set_exception(error)

    async def _live(self, worker: Worker) -> None:
        """Start a process, wait for its end, and clear up after it."""
        problem = ""
        try:
            try:
                await self._begin(worker)
            finally:
                self._starting -= 1
            self._workers.append(worker)
            self._pump()
            await worker.ended.wait()
        except ConfigError as error:
            problem = str(error)
        finally:
            idle = self._closing and not worker.running
            how = await worker.kill(_EXIT_S if idle else 0.0)
            del self._lives[worker]
            if worker in self._workers:
                self._workers.remove(worker)
        self._lost(worker, problem, how)

    async def _begin(self, worker: Worker) -> None:
        """Start a process and let it construct the environment.

        Raises:
            ConfigError: if it cannot.
        """
        threads = self._config.calls or 1
        settings = {
            "environment": self._reference,
            "arguments": self._arguments,
            "python": self._config.python,
            "path": import_path(self._config.python),
            "threads": threads,
        }
        variables = passed_variables(os.environ, self._config.variables)
        try:
            async with self._clock.timeout(self._start_s):
                description = await worker.start(settings, variables)
        except TimeoutError as error:
            raise ConfigError(
                f"environment {self._reference} was not imported and constructed within {self._start_s:g} s"
                f" ({self._start_setting})"
            ) from error
        except NotPlainError as error:
            raise ConfigError(f"environment_args cannot be sent to the environment's processes: {error}") from error
        except OSError as error:
            raise ConfigError(f"a process for environment {self._reference} cannot be started: {error}") from error
        self._scoring = ScoringTime(self._config.score_s, description["scoring_s"], description["scores_together"])
        if self._scoring.too_short(self._group_size):
            raise ConfigError(self._too_short())
        self._coroutines = description["coroutines"]
        worker.room = self._config.calls or (_COROUTINES if self._coroutines else 1)
        if not self._described.done():
            self.name, self.single_turn = description["name"], description["single_turn"]
            self.multi_turn = description["multi_turn"]
            self.poses, self.scores = description["poses"], description["scores"]
            self.plays = description["plays"]
            self._described.set_result(None)
            withheld = sorted(os.environ.keys() - variables.keys())
            log.info("environment is ready", name=self.name, processes=self._most, variables_withheld=withheld)

    @property
    def scoring(self) -> ScoringTime:
        """How long a group may be scored. The environment's part of it is known once the environment has started."""
        return self._scoring

    def _too_short(self) -> str:
        """Return why `score_s` is refused."""
        scoring, count = self._scoring, self._group_size
        programs = f"{count} completions {'at the same time' if scoring.together else 'one after the other'}, "
        return (
            f"{self._section}.score_s is {scoring.score_s:g}, but environment {self._reference} may take {scoring.own_s(count):g} s for a"
            f" group: {programs if count > 1 else ''}up to {scoring.each_s:g} s each. Leave score_s out, so that it follows from the"
            " environment's limits; or raise it; or lower those limits, for the reward `code` environment_args.limits wall_s and cases_s"
        )

    def _answered(self, worker: Worker, call: Call, answer: dict[str, Any]) -> None:
        """Take the answer to a call."""
        self._restarts.answered()
        opened = call.method == "reset" and "value" in answer
        worker.episodes += opened
        if call.answer.done():  # its caller has left
            if opened:
                self._forget(worker, call.arguments["episode"], call.task_id, closed=False)
        elif "raised" in answer:
            call.answer.set_exception(_raised(call, answer["raised"]))
        elif "hung" in answer:
            text = f"{call.name} did not end within {call.limit_s:g} s ({call.setting}) and was cancelled"
            call.answer.set_exception(EnvironmentFailedError(Reason.HUNG, text, call.task_id))
        else:
            call.answer.set_result(answer["value"])
        self._pump()

    def _forget(self, worker: Worker, episode: str, task_id: str, *, closed: bool) -> None:
        """Stop counting an episode. Unless it has ended, let its process forget it, without waiting for that."""
        worker.episodes -= 1
        if not (closed or worker.ended.is_set() or self._closing):
            call = self._submit("close", task_id, {"episode": episode}, self._call_limit, worker)
            discard_outcome(call.answer)
            self._pump()

    def _lost(self, worker: Worker, problem: str, how: str) -> None:
        """Fail the call that ended a process, retry the others, and decide whether to start another process."""
        if self._closing:
            return
        if not self._described.done():  # the first start
            self._described.set_exception(ConfigError(problem or f"the environment's process {how}"))
            return
        end = worker.end or End(Reason.DIED, problem or how)
        running = list(worker.running.values())
        if worker.end is None or worker.end.culprit is None:
            end = End(end.reason, end.text, running[0] if len(running) == 1 else None)
        worker.end = end
        task = end.culprit.task_id if end.culprit is not None else ""
        self.processes_ended[end.reason] += 1
        log.warning(
            "a process of the environment ended",
            environment=self.name,
            process=worker.number,
            reason=end.reason,
            problem=end.text,
            task=task,
            calls=len(running),
            episodes=worker.episodes,
        )
        delay = self._restarts.died(charged=end.culprit is not None)
        if delay is None:
            self._give_up(
                f"the processes of environment {self.name} died {self._config.max_restarts + 1} times in a row without a call at"
                f" fault (the last one: {end.text}): repair the environment, or raise {self._section}.max_restarts"
            )
        else:
            RESTARTS.labels(self.name).inc()
            self._start_at = max(self._start_at, self._clock() + delay)
        for call in [*running, *worker.waiting]:
            self._again(call, end, ran=call.number in worker.running)
        self._pump()

    def _again(self, call: Call, end: End, *, ran: bool) -> None:
        """Retry a call that lost its process, or let it fail."""
        if call.answer.done():
            return
        if call is end.culprit:
            text = f"the environment's process {end.text}"
            if call.name not in text:
                text += f" in {call.name}"
            call.answer.set_exception(EnvironmentFailedError(end.reason, text, call.task_id))
            return
        call.losses += 1
        call.alone |= ran and end.culprit is None
        if self._given_up:
            call.answer.set_exception(
                EnvironmentFailedError(Reason.GIVEN_UP, self._given_up, call.task_id, culprit=False)
            )
        elif call.method in _PINNED or call.losses > MOST_LOSSES:
            call.answer.set_exception(self._lost_error(call, end))
        else:
            self._waiting.appendleft(call)

    def _lost_error(self, call: Call, end: End | None) -> EnvironmentFailedError:
        text = end.text if end is not None else "ended"
        reason = end.reason if end is not None else Reason.DIED
        problem = f"{call.name} was lost with its process, which {text}"
        return EnvironmentFailedError(reason, problem, call.task_id, culprit=False, suspect=call.alone)

    def _give_up(self, why: str) -> None:
        """Let all calls fail, from now on."""
        self._given_up = why
        for call in (*self._waiting, *(call for worker in self._workers for call in worker.waiting)):
            if not call.answer.done():
                call.answer.set_exception(EnvironmentFailedError(Reason.GIVEN_UP, why, call.task_id, culprit=False))
        self._waiting.clear()

    async def _watch_memory(self) -> None:
        """End processes that need too much memory."""
        most = self._config.memory_mib
        room_mib, took_s = float(most), 0.0

        def look(workers: Sequence[Worker]) -> list[float]:
            return [worker.memory_mib(most) for worker in workers]

        while most:
            await self._clock.sleep(memory_look_s(room_mib, took_s))
            began, workers = self._clock(), tuple(self._lives)
            used = await asyncio.to_thread(look, workers)
            for worker, mib in zip(workers, used, strict=True):
                if mib > most:
                    text = f"was killed: it had {mib:.0f} MiB of memory, more than {most} ({self._section}.memory_mib)"
                    worker.end_because(End(Reason.MEMORY, text))
            room_mib, took_s = most - max(used, default=0.0), self._clock() - began


_MISSING = Score(None)

_PINNED = {"step", "close", "tasks", "run"}
"""Methods that cannot be retried in another process, because it lacks their state, or a gateway already has their requests."""


def _raised(call: Call, raised: Mapping[str, str]) -> EnvironmentFailedError:
    """Return the error for a call that raised, or that returned messages of an unusable form."""
    reason, text = Reason.RAISED, f"{call.name} raised {_text(raised)}"
    if raised["type"] == UnfitMessagesError.__name__:
        reason, text = Reason.MESSAGES, f"{call.name}: {raised['message']}"
    elif raised["type"] == ConfigError.__name__:
        text = raised["message"]  # the message is enough
    return EnvironmentFailedError(reason, text, call.task_id)


def _text(raised: Mapping[str, str]) -> str:
    """Return the text of an error, with the environment's own lines of the traceback."""
    return f"{raised['type']}: {raised['message']}\n{raised['trace']}".rstrip()
