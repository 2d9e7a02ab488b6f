"""Plays episodes with a Python class of the user's: finds its method, calls it, and gives the reward that it returns."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, SupportsFloat, TypeAlias

import structlog
from prometheus_client import Counter

from sluice.agent import Episode
from sluice.clock import CLOCK, Clock
from sluice.config import ConfigError
from sluice.environments.processes import EnvironmentProcesses
from sluice.loading import construct
from sluice.threads import CallHungError, DeadlineThreads, TooManyHungError

Outcome: TypeAlias = "float | Mapping[str, float] | None"
"""What an agent returns: the reward of the episode, or rewards by generation id, or None if the agent recorded the reward itself or the
environment scores."""

Method: TypeAlias = Callable[[Episode], "Outcome | Awaitable[Outcome]"]
"""Plays one episode with the user's object."""

ROUNDS = 3
"""Times that the agents must fail one after the other before they give up: all episodes under way may fail of one outage."""

_MOST_KINDS = 8
"""Places in the user's code whose first failure is logged with its traceback."""

EPISODES = Counter("sluice_agents_episodes", "Episodes, by whether they were played to their end.", ("outcome",))

log = structlog.get_logger(__name__)


def load_agent(location: str, arguments: Mapping[str, Any]) -> tuple[Method, bool]:
    """Construct the user's class.

    Args:
        location: ``path/to/agent.py:Class`` or ``module:Class``.
        arguments: Keyword arguments of the class.

    Returns:
        A function that plays an episode with the object, and whether it blocks, so that it needs a thread.

    Raises:
        ConfigError: if it cannot be found, imported or constructed, or has no method that plays an episode.
    """
    try:
        agent = construct(location, "agent", arguments, "agents.args")
    except ConfigError:
        raise
    except Exception as error:
        log.exception("the agent cannot be loaded", agent=location)
        raise ConfigError(
            f"agent {location} cannot be loaded: {describe(error)}; correct it, or agents.args"
        ) from error
    if (run := getattr(agent, "run", None)) is not None:

        def play(episode: Episode) -> Outcome | Awaitable[Outcome]:
            opened = episode.opened
            result: Outcome | Awaitable[Outcome] = run(
                data=episode.data, base_url=opened.openai_base_url, api_key=opened.session_key
            )
            return result

        return play, not inspect.iscoroutinefunction(run)
    if (run_episode := getattr(agent, "arun_episode", None)) is not None:
        if not inspect.iscoroutinefunction(run_episode):
            raise ConfigError(f"agent {location}: arun_episode is not a coroutine: write `async def arun_episode`")
        return lambda episode: run_episode(episode, episode.data), False
    raise ConfigError(
        f"agent {location} has neither `run(self, data, base_url, api_key)` nor `async def arun_episode(self, engine, task)`:"
        " give it one of them"
    )


def hosted_agent(processes: EnvironmentProcesses, location: str, episode_s: float) -> tuple[Method, bool]:
    """Return the same as `load_agent`, for a class that runs in processes of its own.

    Raises:
        ConfigError: if the class has no `run`.
    """
    if not processes.plays:
        raise ConfigError(
            f"agent {location} has no `run(self, data, base_url, api_key)`, which agents.environment_processes needs"
        )

    async def play(episode: Episode) -> Outcome:
        opened = episode.opened
        outcome: Any = await processes.run(
            episode.task.task_id,
            episode.data,
            opened.openai_base_url,
            opened.session_key,
            (episode_s, "agents.episode_s"),
        )
        return outcome  # type: ignore[no-any-return]  # `Player` checks it

    return play, False


class Player:
    """Plays episodes, and counts how they end. Use it from one event loop.

    Args:
        agent: What `load_agent` returned.
        at_a_time: Episodes that are played at the same time.
        episode_s: Seconds for one episode.
        most_failures: Failures in a row after which the agents give up.
        clock: The time of an episode.

    Attributes:
        failures: Failures in a row.
        playing: Episodes that are being played.
        gave_up: Why the agents gave up; empty while they have not.
        ended: Set when they gave up.
    """

    def __init__(
        self, agent: tuple[Method, bool], *, at_a_time: int, episode_s: float, most_failures: int, clock: Clock = CLOCK
    ) -> None:
        self._method, self._blocks = agent
        self._threads = DeadlineThreads("agent", at_a_time, episode_s, most_hung=at_a_time, clock=clock)
        self._episode_s, self._most_failures, self._clock = episode_s, most_failures, clock
        self.failures = self._rounds = self.playing = 0
        self._kinds: set[str] = set()
        self.gave_up, self.ended = "", asyncio.Event()

    async def play(self, episode: Episode) -> None:
        """Play one episode to its end, and submit it.

        Raises:
            Exception: the exception of the agent, or the error of a gateway; TimeoutError after `episode_s`.
        """
        rounds = self._rounds
        self.playing += 1
        try:
            async with self._clock.timeout(self._episode_s) as limit:
                await self._submit(episode, await self._outcome(episode))
        except Exception as error:
            late = isinstance(error, CallHungError) or (isinstance(error, TimeoutError) and limit.expired())
            why = f"it took longer than agents.episode_s ({self._episode_s:g} s)" if late else describe(error)
            self._failed(episode, rounds, why, error)
            raise
        finally:
            self.playing -= 1
        EPISODES.labels("played").inc()
        self.failures = self._rounds = 0

    async def _outcome(self, episode: Episode) -> Outcome:
        try:
            result = await self._threads.run(self._method, episode) if self._blocks else self._method(episode)
        except TooManyHungError as error:
            raise RuntimeError(
                f"{error} (agents.episode_s), and threads cannot be killed: give the agent's own calls deadlines"
            ) from error
        return await result if inspect.isawaitable(result) else result

    async def _submit(self, episode: Episode, outcome: Outcome) -> None:
        """Record the rewards and end the episode, unless the agent ended it itself."""
        if isinstance(outcome, Mapping):
            for generation, reward in outcome.items():
                await episode.reward(float(reward), generation_id=generation)
            outcome = None
        if not isinstance(outcome, SupportsFloat | None):
            raise TypeError(
                f"the agent returned {outcome!r}: return a reward, rewards by generation id, or None if the environment scores"
            )
        if not episode.ended:
            await episode.submit(None if outcome is None else float(outcome))

    def _failed(self, episode: Episode, rounds: int, why: str, error: Exception) -> None:
        """Count a failure. `rounds` is the number of them when the episode began."""
        EPISODES.labels("failed").inc()
        self.failures += 1
        self._rounds = max(self._rounds, min(self._rounds, rounds) + 1)
        if why not in self._kinds and len(self._kinds) < _MOST_KINDS:
            self._kinds.add(why)
            log.warning("an agent failed", task=episode.task.task_id, why=why, exc_info=error)
        if self.failures >= self._most_failures and self._rounds >= ROUNDS and not self.gave_up:
            self.gave_up = (
                f"{self.failures} episodes in a row failed (agents.most_failures), the last one because: {why}; correct the agent,"
                " then continue the run with --resume"
            )
            self.ended.set()


def describe(error: BaseException) -> str:
    """Return an exception for people, with the innermost line of its traceback that is not in a library."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "site-packages" not in each.filename]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
