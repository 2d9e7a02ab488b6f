"""The protocol of an environment in Python. Any object with these methods is an environment; nothing is inherited.

A single-turn environment poses messages and scores completions::

    class Reverse:
        name = "reverse"

        def tasks(self, split: str, seed: int) -> list[Task]: ...
        def messages(self, task: Task) -> list[Message]: ...
        def score(self, task: Task, completion: str) -> float | Score: ...

An optional `score_batch(task, completions)` scores several completions at once; None in its list is a missing reward. An environment
may end a scoring itself that takes too long. Then its attribute `scoring_s` is the maximum number of seconds for one completion, and the
time limit to score a group follows from it, unless `score_s` is set. A multi-turn environment has `reset` instead of `messages` and
`score`. If external agents run the episodes, `messages` (with which an episode begins) and `score` (used if the agent gives no reward)
are each optional. All methods run in separate processes (`orchestrator.environment_processes`), each call with a time limit; the
environment is constructed once in each process. Methods may be coroutines: then many calls run concurrently in one process. Return
values must be plain data: texts, numbers, booleans, None, lists, and dicts whose keys are texts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

Message: TypeAlias = Mapping[str, Any]
"""A chat message: `role` ("system", "user", "assistant", "tool") and `content`; where needed also `name`, `tool_calls` (as in
the OpenAI API), `tool_call_id` and `reasoning`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem.

    Attributes:
        task_id: Unique within the environment's split.
        data: Data with which the environment poses and scores it; plain values (they travel between processes, tuples as lists).
        max_tokens: Maximum number of tokens sampled per turn of this task, instead of `orchestrator.sampling.max_tokens`.
    """

    task_id: str
    data: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The score of an answer.

    Attributes:
        reward: The reward, a finite number; None if it is missing, which is not 0.
        metrics: Measures to log, by name, such as the parts of the reward.
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __float__(self) -> float:
        """Return the reward.

        Raises:
            ValueError: if it is missing.
        """
        if self.reward is None:
            raise ValueError("the reward is missing")
        return float(self.reward)


def number(value: Any, what: str) -> float:  # noqa: ANN401 - whatever was returned
    """Return a finite number as a float: Python's numbers and truth values, scalars of numpy and torch.

    Args:
        value: The number.
        what: Description of the number, for messages.

    Raises:
        TypeError: if it is not a number. A text is not a number.
        ValueError: if it is not finite.
    """
    found = as_float(value, what)
    if not math.isfinite(found):
        raise ValueError(f"{what} is {found}, not a finite number")
    return found


def as_float(value: Any, what: str) -> float:  # noqa: ANN401 - whatever was returned
    """Return a number as `number` does, even if it is not finite.

    Raises:
        TypeError: if it is not a number.
    """
    try:
        if hasattr(type(value), "__float__"):
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # an array of several, a number beyond floats
        raise TypeError(f"{what} is {value!r:.120} ({type(value).__name__}), not a number: {error}") from error
    raise TypeError(f"{what} is {value!r:.120} ({type(value).__name__}), not a number")


@contextlib.contextmanager
def noted(where: str) -> Iterator[None]:
    """Add `where` as a note to errors raised in the block. Error messages show it."""
    try:
        yield
    except BaseException as error:
        error.add_note(where)
        raise


@dataclass(frozen=True, slots=True)
class Turn:
    """The environment's answer to a turn of the assistant.

    Attributes:
        messages: Messages in answer to the turn; empty when the episode has ended.
        reward: Reward of the turn; None if it has no reward.
        done: Whether the episode has ended.
        truncated: Whether a limit of the environment ended it, rather than its rules.
        metrics: Measures to log, by name.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """The part that every environment has. It is enough if external agents run the episodes (`orchestrator.workflow = "external"`)."""

    name: str

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the tasks of a split; the same seed gives the same tasks in the same order. Called once per split."""
        ...


@runtime_checkable
class SingleTurnEnvironment(Environment, Protocol):
    """Poses one question and scores the answer."""

    def messages(self, task: Task) -> Sequence[Message]:
        """Return the conversation up to the assistant's answer."""
        ...

    def score(self, task: Task, completion: str) -> float | Score:
        """Return the reward of one completion, a finite number, or a `Score`. If this raises, the reward is missing, not 0."""
        ...


class Episode(Protocol):
    """One attempt in progress in a multi-turn environment. All its steps run in one process, one at a time.

    If it has an attribute `tools`, with descriptions of functions as in the OpenAI API, the assistant may call them, and `step` gets
    the assistant's message with `tool_calls` instead of its text. The answer to a call is a message of the role "tool" with the call's
    `tool_call_id`. If `step` has a parameter `last`, it is True if the run takes no further turn, because `max_tokens` cut this turn off
    or it was the last of `max_turns`. Then the answer should have the reward for the episode so far. A method `close`, if there is one,
    is called at the end of the episode, unless its process dies first.
    """

    messages: Sequence[Message]

    def step(self, completion: Any) -> Turn:  # noqa: ANN401 - a text, or with `tools` a message
        """Take the assistant's turn."""
        ...


@runtime_checkable
class MultiTurnEnvironment(Environment, Protocol):
    """Opens episodes of several turns. The reward of an episode is the sum of its turns' rewards."""

    def reset(self, task: Task, seed: int) -> Episode:
        """Begin an episode.

        If a process ends because of another episode, this one is replayed elsewhere: `reset` with the same seed, then the same steps.
        """
        ...
