"""Data sets and reward functions for verl's PPO trainer, used unmodified. verl itself is not needed.

Apache-2.0: https://github.com/volcengine/verl, of January 2026.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from sluice.environments.base import Message, Score, Task, as_float, noted, number
from sluice.environments.datasets import Row, placed_rows
from sluice.environments.framing import NotPlainError
from sluice.environments.rewards import CHECKS, gsm8k_reward, math_reward
from sluice.environments.stored_tasks import StoredTasks
from sluice.errors import ConfigError
from sluice.loading import load_attribute

_MATH = ("math", "lighteval/math", "digitallearninggmbh/math", "huggingfaceh4/math", "aime", "numina_")
"""Prefixes of the names of mathematical data sources, in lower case."""


def load(
    dataset: str | Sequence[str],
    *,
    eval_dataset: str | Sequence[str] = (),
    reward: str = "",
    reward_kwargs: Mapping[str, Any] | None = None,
    prompt: str = "prompt",
    source: str = "data_source",
    system: str = "",
    limit: int | None = None,
) -> Rows:
    """Trains on Parquet files with a reward function, both written for verl, unmodified.

    Args:
        dataset: One file or several, with the columns prompt (messages), data_source, reward_model.ground_truth and extra_info.
        eval_dataset: Files for evaluation; by default `dataset`.
        reward: Function of (data_source, solution_str, ground_truth, extra_info), as ``path.py:compute_score``. It returns a number, or
            a dict with `score` whose other numbers are logged. By default the answers of gsm8k and mathematical data sets are compared.
        reward_kwargs: Further arguments of the function.
        prompt: Column of the messages.
        source: Column of the name of the data source.
        system: System message before each prompt; none if empty.
        limit: Maximum number of rows to train on.
    """
    function = load_attribute(reward, "reward function") if reward else compare
    return Rows(
        train=_paths(dataset),
        evaluated=_paths(eval_dataset),
        function=function,
        more=reward_kwargs or {},
        prompt=prompt,
        source=source,
        system=system,
        limit=limit,
    )


def compare(data_source: str, solution_str: str, ground_truth: object, **_: object) -> float:
    """Return 1 if the answer is right, else 0, for gsm8k and mathematical data sets. `check_comparable` checks what it accepts."""
    reward = gsm8k_reward if data_source.lower().endswith("gsm8k") else math_reward
    return reward(solution_str, str(ground_truth))


def check_comparable(data_source: str, ground_truth: object) -> None:
    """Check that `compare` has a reward for a row.

    Raises:
        ValueError: if the data source is unknown, or the ground truth is not a text or number that can be compared.
    """
    is_gsm8k = data_source.lower().endswith("gsm8k")
    if not is_gsm8k and not data_source.lower().startswith(_MATH):
        raise ValueError(f"there is no reward for the data source {data_source!r}")
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float):
        raise ValueError(f"its reward_model.ground_truth is {ground_truth!r:.80}, not a text or a number")  # noqa: TRY004 - of a row
    CHECKS["gsm8k" if is_gsm8k else "math"](str(ground_truth))


def _paths(named: str | Sequence[str]) -> list[str]:
    return [named] if isinstance(named, str) else list(named)


@dataclass(kw_only=True)
class Rows:
    """Asks the prompts of the files. The function scores the answers.

    Attributes:
        train: Files to train on.
        evaluated: Files for evaluation; if empty, the files to train on.
        function: The reward function; see `load` for it and the other arguments.
        more: Further arguments of the function.
    """

    name: ClassVar[str] = "verl"

    train: Sequence[str]
    evaluated: Sequence[str]
    function: Callable[..., Any]
    more: Mapping[str, Any]
    prompt: str
    source: str
    system: str
    limit: int | None

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the rows of the files. The order of rows to train on depends on the seed.

        Raises:
            ConfigError: if a file cannot be read or lacks a column.
        """
        found = StoredTasks()
        files = self.train if split == "train" else self.evaluated or self.train
        for place, row in chain.from_iterable(placed_rows(file, split) for file in files):
            if self.prompt not in row or not isinstance(row.get("reward_model"), Mapping):
                raise ConfigError(
                    f"{place} has the columns {', '.join(row)}, not {self.prompt} and reward_model, as verl's files have: for a file of"
                    " questions and answers, use the environment question_answer"
                )
            try:
                if self.function is compare:
                    check_comparable(str(row.get(self.source, "")), row["reward_model"].get("ground_truth"))
                found.append(Task(f"{split}-{len(found)}", {"row": dict(row)}))
            except NotPlainError as error:
                raise ConfigError(f"{place} does not fit: {error}; correct the row, or leave the column out") from error
            except ValueError as error:
                raise ConfigError(
                    f"{place} does not fit: {error}; set environment_args reward to a function, as"
                    " path.py:compute_score, or leave the row out"
                ) from error
        if split == "train":
            found.cut(self.limit)
            found.shuffle(seed)
        return found

    def messages(self, task: Task) -> Sequence[Message]:
        """Return the prompt, after the system message."""
        prompt = task.data["row"][self.prompt]
        asked: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]
        )
        return [{"role": "system", "content": self.system}, *asked] if self.system else asked

    async def score(self, task: Task, completion: str) -> Score:
        """Return the function's score for an answer."""
        row: Row = task.data["row"]
        name = getattr(self.function, "__name__", type(self.function).__name__)
        with noted(f"raised by the reward function {name}; row {task.task_id}"):
            found = self.function(
                data_source=row.get(self.source, ""),
                solution_str=completion,
                ground_truth=row["reward_model"].get("ground_truth"),
                extra_info=dict(row.get("extra_info") or {}),
                **self.more,
            )
            said = await found if inspect.isawaitable(found) else found
        return _score(said, f"{name} for row {task.task_id}")


def _score(said: Any, who: str) -> Score:  # noqa: ANN401 - whatever was returned
    """Return a function's result as a score. Numbers beside ``score`` become measures; texts are ignored."""
    if not isinstance(said, Mapping):
        if isinstance(said, list | tuple):
            raise TypeError(f'{who} returned {said!r:.120}: return a number, or a dict with "score" and measures')
        return Score(None if said is None else number(said, f"what {who} returned"))
    if "score" not in said:
        raise ValueError(f'{who} returned a dict without "score", but with {", ".join(map(str, said)) or "nothing"}')
    measures = {
        str(name): value for name, value in said.items() if name != "score" and hasattr(type(value), "__float__")
    }
    found = {name: as_float(value, f"the measure {name} of {who}") for name, value in measures.items()}
    reward = None if said["score"] is None else number(said["score"], f"the score of {who}")
    return Score(reward, {name: value for name, value in found.items() if math.isfinite(value)})
