"""Data sets, reward functions and environment classes for TRL's GRPOTrainer, used unmodified. TRL itself is not needed.

Apache-2.0: https://huggingface.co/docs/trl, version 1.16.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sluice.environments.base import Message, Score, Task, Turn, as_float, noted, number
from sluice.environments.datasets import Place, Row, placed_rows
from sluice.environments.framing import NotPlainError
from sluice.environments.stored_tasks import StoredTasks
from sluice.errors import ConfigError
from sluice.loading import load_attribute

RewardFunction = Callable[..., Sequence[float | None]]

_OWN = ("prompt", "completion", "completion_ids", "completions", "prompts")
"""Columns that reward functions do not get under their own name."""

_NOT_TOOLS = {"reset", "get_reward", "close"}


def load(
    *,
    dataset: str = "",
    reward_funcs: Sequence[str] | str = (),
    reward_weights: Sequence[float] | None = None,
    environment_factory: str = "",
    tasks: int = 4096,
    limit: int | None = None,
    system: str = "",
    argv: Sequence[str] = (),
) -> Questions | Environments:
    """Trains with reward functions or an environment class written for TRL, unmodified.

    Args:
        dataset: Rows with a column `prompt`, a text or messages: a file, a directory, or a hub id; see `sluice.environments.datasets`.
        reward_funcs: Functions, as ``path.py:function`` or ``module:function``.
        reward_weights: Factor for the reward of each function before the rewards are added; by default 1.
        environment_factory: Class whose public methods are tools, as ``path.py:Class``.
        tasks: Number of episodes to train on if there is no data set.
        limit: Maximum number of rows of a split.
        system: System message before each prompt; none if empty.
        argv: Command line for the script with the functions; the script sees it as `sys.argv`.
    """
    if argv:
        sys.argv[:] = argv
    named = [reward_funcs] if isinstance(reward_funcs, str) else list(reward_funcs)
    rewards = Rewards({each: load_attribute(each, "reward function") for each in named}, reward_weights)
    if environment_factory:
        factory = load_attribute(environment_factory, "environment class")
        return Environments(_Rows(dataset, tasks, limit, system), rewards, factory)
    if not dataset:
        raise ConfigError(
            "trl needs a dataset, or an environment_factory whose `reset` gives the prompt: set environment_args"
        )
    if not named:
        raise ConfigError("trl needs reward_funcs, or an environment_factory with `get_reward`: set environment_args")
    return Questions(_Rows(dataset, tasks, limit, system, prompted=True), rewards)


class Rewards:
    """Adds the rewards of several functions.

    Args:
        functions: Functions, by their names in the settings.
        weights: Their weights, in the same order.

    Raises:
        ConfigError: if the number of weights is wrong, or a function needs an argument that a run cannot give.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], weights: Sequence[float] | None) -> None:
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(
                f"there are {len(functions)} reward_funcs and {len(weights)} reward_weights: give one for each"
            )
        for location, function in functions.items():
            if "completion_ids" in inspect.signature(function).parameters:
                raise ConfigError(
                    f"reward function {location} asks for completion_ids, but environments have no tokens: use the text"
                )
        self._functions = list(functions.values())
        names = [location.rpartition(":")[2] for location in functions]
        self._names = names if len(set(names)) == len(names) else list(functions)
        self._weights = weights or [1.0] * len(functions)

    async def score(
        self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]], **more: object
    ) -> list[Score]:
        """Return the weighted sum for each completion, and each function's own reward as a measure.

        A function that returns None or NaN for a completion is left out of its sum. If all functions do, the completion's reward is missing.

        Raises:
            TypeError: if a function returns something that is not a number.
            ValueError: if it does not return one reward for each completion, or a reward is infinite.
        """
        totals: list[float | None] = [None] * len(completions)
        logged: list[dict[str, float]] = [{} for _ in completions]

        def log_metric(name: str, value: float) -> None:
            for each in logged:
                each[name] = float(value)

        given: dict[str, Any] = {name: values for name, values in columns.items() if name not in _OWN}
        given |= {"trainer_state": None, "log_metric": log_metric, "log_extra": lambda *_: None, **more}
        for name, function, weight in zip(self._names, self._functions, self._weights, strict=True):
            with noted(f"raised by the reward function {name}"):
                found: Any = function(
                    prompts=list(prompts), completions=list(completions), **_accepted(function, given)
                )
                found = await found if inspect.isawaitable(found) else found
            for place, value in enumerate(await _each(found, name, len(completions))):
                reward = math.nan if value is None else as_float(value, f"a reward of {name}")
                if math.isnan(reward):
                    continue
                logged[place][name] = number(reward, f"a reward of {name}")
                totals[place] = (totals[place] or 0.0) + weight * reward
        return [Score(total, metrics) for total, metrics in zip(totals, logged, strict=True)]


async def _each(found: Any, name: str, count: int) -> list[Any]:  # noqa: ANN401 - whatever was returned
    """Return the rewards in a list, an array or an iterator. Await them if necessary."""
    try:
        values = [] if isinstance(found, str | Mapping) else list(found)
    except TypeError:
        values = []
    if len(values) != count:
        raise ValueError(
            f"{name} returned {found!r:.120} ({type(found).__name__}) for {count} completions: return a list with one reward for each"
        )
    return [await each if inspect.isawaitable(each) else each for each in values]


def _accepted(function: RewardFunction, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return those of the given arguments that a function accepts."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


class _Rows:
    """The rows of a data set as tasks."""

    def __init__(self, dataset: str, tasks: int, limit: int | None, system: str, *, prompted: bool = False) -> None:
        self._dataset, self._tasks, self._limit, self._system = dataset, tasks, limit, system
        self._prompted = prompted

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the rows of a split in an order that the seed determines."""
        if not self._dataset:
            return [Task(f"{split}-{index}", {"row": {}}) for index in range(self._tasks)]
        found = StoredTasks()
        for index, (place, row) in enumerate(placed_rows(self._dataset, split)):
            if self._limit is not None and index >= self._limit:
                break
            self._check(place, row)
            try:
                found.append(Task(f"{split}-{index}", {"row": dict(row)}))
            except NotPlainError as error:
                raise ConfigError(f"{place} does not fit: {error}; correct the row, or leave the column out") from error
        if split == "train":
            found.shuffle(seed)
        return found

    def _check(self, place: Place, row: Row) -> None:
        """Refuse a row whose prompt is missing but needed, or has the wrong form."""
        if "prompt" not in row:
            if self._prompted:
                raise ConfigError(f"{place} has no column prompt, but {', '.join(row)}")
            return
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return
        wrong = f"prompt is {'null' if prompt is None else f'{prompt!r:.80}'}"
        if isinstance(prompt, list) and prompt:
            odd = next((index for index, each in enumerate(prompt) if not _is_message(each)), None)
            if odd is None:
                return
            wrong = f"prompt[{odd}] is {prompt[odd]!r:.80}"
        raise ConfigError(f"{place} does not fit: {wrong}; give a text, or a list of messages with role and content")

    def messages(self, row: Row) -> list[Message]:
        """Return the prompt of a row as messages."""
        prompt = row.get("prompt", "")
        asked: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]
        )
        return [{"role": "system", "content": self._system}, *asked] if self._system else asked


def _is_message(value: Any) -> bool:  # noqa: ANN401 - whatever a row has
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


class Questions:
    """Asks the prompts of a data set. Reward functions score the answers."""

    name = "trl"

    def __init__(self, data: _Rows, rewards: Rewards) -> None:
        self._data, self._rewards = data, rewards

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the rows of a split."""
        return self._data.tasks(split, seed)

    def messages(self, task: Task) -> Sequence[Message]:
        """Return the prompt."""
        return self._data.messages(task.data["row"])

    async def score(self, task: Task, completion: str) -> Score:
        """Return the score of one completion."""
        (score,) = await self.score_batch(task, [completion])
        return score

    async def score_batch(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """Return the scores of the completions of a group."""
        row = task.data["row"]
        plain = isinstance(row["prompt"], str)
        said = completions if plain else [[{"role": "assistant", "content": each}] for each in completions]
        columns = {name: [value] * len(completions) for name, value in row.items()}
        with noted(f"row {task.task_id}"):
            return await self._rewards.score([row["prompt"]] * len(completions), said, columns)


class Environments:
    """Opens an object of the class for each episode."""

    def __init__(self, data: _Rows, rewards: Rewards, factory: Callable[[], Any]) -> None:
        self.name = getattr(factory, "__name__", "trl")
        self._data, self._rewards, self._factory = data, rewards, factory

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the rows of a split; without a data set, numbered episodes."""
        return self._data.tasks(split, seed)

    async def reset(self, task: Task, seed: int) -> ToolEpisode:
        """Begin an episode. The random numbers in the class's `reset` are the same for all attempts at a task."""
        row = task.data["row"]
        random.seed(task.task_id)
        environment = self._factory()
        observation = environment.reset(**row)
        if inspect.isawaitable(observation):
            observation = await observation
        messages = self._data.messages(row)
        if observation is not None:
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last['content']}{observation}"}
        return ToolEpisode(environment, messages, row, self._rewards)


class ToolEpisode:
    """An episode: calls the methods that the model names, and ends with its first message without a call."""

    def __init__(self, environment: Any, messages: list[Message], row: Row, rewards: Rewards) -> None:  # noqa: ANN401 - the user's class
        self.messages = messages
        self._environment, self._row, self._rewards = environment, row, rewards
        self._prompt, self._said = list(messages), list[Message]()
        members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
        self._methods = {
            name: getattr(environment, name)
            for name, _ in members
            if name not in _NOT_TOOLS and not name.startswith("_")
        }
        self.tools = [_schema(each) for each in self._methods.values()]

    async def step(self, said: Any, last: bool = False) -> Turn:  # noqa: ANN401 - a message, or a text where there are no tools
        """Answer a turn of the assistant. If it is the `last` one, score the episode so far, as TRL does."""
        message: Message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        self._said.append(message)
        if calls := message.get("tool_calls"):
            results = [await self._result(call) for call in calls]
            self._said += results
            if not last:
                return Turn(messages=results)
        score = await self._score()
        return Turn(reward=score.reward, done=True, truncated=bool(calls), metrics=score.metrics)

    async def close(self) -> None:
        """Close the environment, if it has a way to."""
        if callable(close := getattr(self._environment, "close", None)):
            closed = close()
            if inspect.isawaitable(closed):
                await closed

    async def _result(self, call: Mapping[str, Any]) -> Message:
        """Call a method. If it raises, the error is its result, so that the model can do better."""
        name = call["function"]["name"]
        if name not in self._methods:
            return {"role": "tool", "tool_call_id": call["id"], "content": f"error: there is no tool {name}"}
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
            found = self._methods[name](**arguments)
            content = str(await found if inspect.isawaitable(found) else found)
        except Exception as error:  # noqa: BLE001 - as TRL has it: the model learns of it
            content = f"error: {error}"
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    async def _score(self) -> Score:
        columns = {name: [value] for name, value in self._row.items()}
        (score,) = await self._rewards.score([self._prompt], [self._said], columns, environments=[self._environment])
        if not callable(own := getattr(self._environment, "get_reward", None)):
            return score
        value = own()
        value = await value if inspect.isawaitable(value) else value
        value = number(value, f"what get_reward of {type(self._environment).__name__} returned")
        return Score((score.reward or 0.0) + value, {**score.metrics, type(self._environment).__name__: value})


def _schema(method: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the tool schema of a method, from its types and its docstring."""
    from transformers.utils import get_json_schema  # noqa: PLC0415 - slow to import

    schema: Mapping[str, Any] = get_json_schema(method)
    return schema
