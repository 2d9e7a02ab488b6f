"""What an environment written in Python looks like. Any object with these methods is one; nothing is inherited.

A single-turn environment poses messages and scores completions::

    class Reverse:
        name = "reverse"

        def tasks(self, split: str, seed: int) -> list[Task]: ...
        def messages(self, task: Task) -> list[Message]: ...
        def score(self, task: Task, completion: str) -> float | Score: ...

`score_batch(task, completions)`, if it is there too, scores several completions at once; None in its list is a missing reward.
An environment that ends by itself what takes too long to score says so with an attribute `scoring_s`, the most seconds that it takes
for one completion: the time to score a group follows from it, unless `score_s` is set.
A multi-turn environment has `reset` instead of `messages` and `score`. Where external agents run the episodes, `messages` (what
they begin with) and `score` (where they give no reward) are each optional. All methods run in processes of their own
(`orchestrator.environment_processes`), each call with a time limit; the environment is constructed once in each process. Methods may
be coroutines: many calls then run side by side in one process. What a method returns must be plain data: texts, numbers, booleans,
None, lists, and dicts whose keys are texts.
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
        data: What the environment needs to pose and score it; plain values (they travel between processes, tuples as lists).
        max_tokens: Most tokens sampled per turn of this task, in place of `orchestrator.sampling.max_tokens`.
    """

    task_id: str
    data: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """What an answer is worth.

    Attributes:
        reward: The reward, a finite number; None if it is missing, which is not 0.
        metrics: Measures to log, by name, such as the rewards that it is the sum of.
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
        what: What it is, for messages.

    Raises:
        TypeError: if it is no number; a text is none.
        ValueError: if it is not finite.
    """
    found = as_float(value, what)
    if not math.isfinite(found):
        raise ValueError(f"{what} is {found}, not a finite number")
    return found


def as_float(value: Any, what: str) -> float:  # noqa: ANN401 - whatever was returned
    """Return a number as `number` does, also one that is not finite.

    Raises:
        TypeError: if it is no number.
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
        messages: Messages that answer it; empty when the episode has ended.
        reward: Reward of the turn; None if it has no reward.
        done: Whether the episode has ended.
        truncated: Whether it ended by a limit of the environment rather than by its rules.
        metrics: Measures to log, by name.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """What every environment has. It is enough if external agents run the episodes (`orchestrator.workflow = "external"`)."""

    name: str

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the tasks of a split; the same seed gives the same tasks in the same order. Called once per split."""
        ...


@runtime_checkable
class SingleTurnEnvironment(Environment, Protocol):
    """Poses one question and scores the answer."""

    def messages(self, task: Task) -> Sequence[Message]:
        """Return the conversation up to where the assistant answers."""
        ...

    def score(self, task: Task, completion: str) -> float | Score:
        """Return the reward of one completion, a finite number, or a `Score`. Raising makes it missing, not 0."""
        ...


class Episode(Protocol):
    """One attempt under way in a multi-turn environment. All its steps run in one process, one at a time.

    If it has an attribute `tools`, with descriptions of functions as in the OpenAI API, the assistant may call them, and `step` gets
    its message with `tool_calls` in place of its text. What is answered to a call is a message of the role "tool" with its
    `tool_call_id`. If `step` has a parameter `last`, it is True where the run takes no further turn: `max_tokens` cut this one off, or
    it was the last of `max_turns`. The answer should then have the reward of what there is. A method `close`, if there is one, is called
    at the end of the episode, unless its process dies first.
    """

    messages: Sequence[Message]

    def step(self, completion: Any) -> Turn:  # noqa: ANN401 - a text, or with `tools` a message
        """Take the assistant's turn."""
        ...


@runtime_checkable
class MultiTurnEnvironment(Environment, Protocol):
    """Opens episodes of several turns; the reward of an episode is the sum of its turns' rewards."""

    def reset(self, task: Task, seed: int) -> Episode:
        """Begin an episode.

        If a process ends because of another episode, this one is replayed elsewhere: `reset` with the same seed, then the same steps.
        """
        ...
