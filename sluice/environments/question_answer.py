"""A single-turn environment over any data set of questions and answers, with some reward functions."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from sluice.environments.base import Message, Score, Task, noted, number
from sluice.environments.datasets import Row, placed_rows
from sluice.environments.formats import Format, find_format
from sluice.environments.rewards import CHECKS, REWARDS, CodeReward, Judge, RewardFunction
from sluice.environments.stored_tasks import StoredTasks
from sluice.errors import ConfigError
from sluice.loading import load_attribute

Check: TypeAlias = Callable[[str], object]
"""Raises a ValueError for an answer that a reward cannot take."""


def load(  # noqa: D417 - also the arguments of `QuestionAnswer`
    dataset: str = "",
    *,
    judge: Mapping[str, Any] | None = None,
    reward: str = "",
    **given: Any,  # noqa: ANN401 - as there
) -> QuestionAnswer | AwaitedQuestions:
    """Asks the questions of a data set. Answers are compared, tested, or judged by a model.

    Args:
        dataset: A file, a directory or a hub id; see `sluice.environments.datasets`. Empty: the format's.
        format: ``gsm8k``, ``hendrycks_math``, or ``file.py:function`` of a row; see `sluice.environments.formats`. Empty: rows have
            the fields `question` and `answer`.
        question: Field of the question: a text, or messages.
        answer: Field of the answer.
        reward: ``exact``, ``math``, ``gsm8k``, ``code``, or ``module:function`` of (completion, answer). Empty: the format's.
        sandbox: For ``code``: ``auto`` confines the programs, ``none`` runs them with all rights of this process.
        limits: For ``code``: ``wall_s``, ``cases_s``, ``cpu_s``, ``memory_mib``, ``output_kib``, ``threads``, ``packages``.
        judge: Instead of `reward`: ``url``, ``model``, ``prompt``, ``key_variable``, ``timeout_s``, ``at_a_time``.
        system: System message; none if empty.
        name: Configuration of a hub data set.
        limit: Maximum number of tasks per split.
    """
    if judge is not None:
        if reward:
            raise ConfigError("give either reward or judge")
        return _judged(QuestionAnswer(dataset, checked=False, **given), Judge(**judge))
    questions = QuestionAnswer(dataset, reward=reward, **given)
    return AwaitedQuestions(questions, questions.awaited_score) if questions.awaits else questions


def _judged(questions: QuestionAnswer, judge: Judge) -> AwaitedQuestions:
    """Return questions whose answers a model scores."""

    async def score(task: Task, completion: str) -> float:
        question = task.data["question"]
        asked = question if isinstance(question, str) else question[-1]["content"]
        return await judge.score(asked, task.data["answer"], completion)

    return AwaitedQuestions(questions, score, judge.timeout_s)


def _function(reward: str, sandbox: str, limits: Mapping[str, Any] | None) -> tuple[RewardFunction, Check | None]:
    """Return a reward function, and a function that refuses answers that it cannot use."""
    if reward == "code":
        if sandbox not in {"auto", "none"}:
            raise ConfigError(f'sandbox is "auto" or "none", not {sandbox!r}')
        code = CodeReward(limits, confined=sandbox == "auto")
        return code, code.check
    if reward in REWARDS:
        return REWARDS[reward], CHECKS[reward]
    return load_attribute(reward, "reward"), None


def _answer(found: Any, structured: bool) -> str:  # noqa: ANN401 - whatever a row has
    """Return an answer as text: numbers as they are written, lists and objects as JSON if the reward is `structured`.

    Raises:
        ValueError: if the row has no answer.
    """
    if isinstance(found, str):
        return found
    if isinstance(found, float) and found.is_integer():
        return str(int(found))  # a column of whole numbers with a missing value holds 7.0
    if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
        return str(found)
    if structured and isinstance(found, list | dict):
        return json.dumps(found)
    kind = "null" if found is None else f"{found!r:.80}"
    raise ValueError(f"it is {kind}: give a text" + (", a list or an object" if structured else " or a number"))


def _kept(found: Any) -> Any:  # noqa: ANN401 - whatever a row has
    """Return an answer unchanged, as in the row, for a user's function.

    Raises:
        ValueError: if there is none.
    """
    if found is None or (isinstance(found, float) and not math.isfinite(found)):
        raise ValueError(f"it is {'null' if found is None else found}: give a text, a number, a list or an object")
    return found


def _question(found: Any) -> str | list[Message]:  # noqa: ANN401 - whatever a row has
    """Return a question.

    Raises:
        ValueError: if it is neither a text nor messages.
    """
    if isinstance(found, str):
        return found
    if (
        isinstance(found, list)
        and found
        and all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in found)
    ):
        return found
    raise ValueError(
        f"it is {'null' if found is None else f'{found!r:.80}'}: give a text, or a list of messages with role and content"
    )


def fields(question: str, answer: str) -> Format:
    """Return the format of rows with the question in one field and the answer in another, and perhaps ``id`` and ``entry_point``."""

    def read(row: Row) -> Mapping[str, Any]:
        named = {name: row[name] for name in ("id", "entry_point") if row.get(name) is not None}
        return {"question": row[question], "answer": row[answer], **named}

    return Format(read)


class QuestionAnswer:
    """Scores answers with a reward function. The arguments are those of `load`.

    Args:
        checked: False accepts answers that the reward function cannot use, because something else scores.

    Attributes:
        scoring_s: Maximum seconds to score one answer; 0 if the reward function has no such limit.
        awaits: Whether the reward function is a coroutine.
    """

    name = "question_answer"

    def __init__(
        self,
        dataset: str = "",
        *,
        format: str = "",  # noqa: A002 - the parameters are the settings
        question: str = "question",
        answer: str = "answer",
        reward: str = "",
        sandbox: str = "auto",
        limits: Mapping[str, Any] | None = None,
        system: str = "",
        name: str | None = None,
        limit: int | None = None,
        checked: bool = True,
    ) -> None:
        self._format = find_format(format) if format else fields(question, answer)
        self._dataset = dataset or self._format.dataset
        if not self._dataset:
            raise ConfigError("no data set is named: set environment_args dataset to a file, a directory or a hub id")
        self._configuration = name or (None if dataset else self._format.name)
        self._name = reward or self._format.reward
        self._reward, self._check = _function(self._name, sandbox, limits)
        if not checked:
            self._check = None
        self._keeps_answers = checked and self._name != "code" and self._name not in REWARDS
        self.scoring_s = float(getattr(self._reward, "scoring_s", 0.0))
        self.awaits = inspect.iscoroutinefunction(self._reward)
        self._fields = ("question", "answer") if format else (question, answer)
        self._system, self._limit = system, limit

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the questions of a split in an order that depends on the seed. A single file is used for every split.

        Raises:
            ConfigError: if the data set cannot be read or a row lacks a field.
        """
        tasks = StoredTasks()
        for index, (place, row) in enumerate(placed_rows(self._dataset, split, self._configuration)):
            if self._limit is not None and len(tasks) >= self._limit:
                break
            try:
                found = self._format.read(row)
                if found is not None:
                    tasks.append(Task(str(found.get("id", f"{split}-{index}")), self._asked(found)))
            except (KeyError, TypeError, ValueError) as error:
                why = f"it has no field {error}" if isinstance(error, KeyError) else str(error)
                raise ConfigError(
                    f"{place}, with the fields {', '.join(row)}, does not fit: {why}; correct the row, or set"
                    " environment_args question and answer to the fields, or a format that leaves the row out"
                ) from error
        tasks.shuffle(seed)
        return tasks

    def _asked(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the data of a task.

        Raises:
            ValueError: if its question or answer cannot be used.
        """
        answer = found["answer"]
        if self._name == "code" and found.get("entry_point") and isinstance(answer, str) and "def check(" in answer:
            answer = {"test": answer, "entry_point": found["entry_point"]}
        try:
            answer = (
                _kept(answer)
                if self._keeps_answers
                else _answer(answer, structured=self._check is None or self._name == "code")
            )
            if self._check is not None:
                self._check(answer)
        except ValueError as error:
            raise ValueError(f"field {self._fields[1]}: {error}") from error
        try:
            return {"question": _question(found["question"]), "answer": answer}
        except ValueError as error:
            raise ValueError(f"field {self._fields[0]}: {error}") from error

    def messages(self, task: Task) -> Sequence[Message]:
        """Return the question, after the system message."""
        question = task.data["question"]
        asked = list(question) if not isinstance(question, str) else [{"role": "user", "content": question}]
        return [{"role": "system", "content": self._system}, *asked] if self._system else asked

    def score(self, task: Task, completion: str) -> float | Score | None:
        """Return the reward function's result for a completion.

        Raises:
            TypeError: if the result is not a number.
            ValueError: if it is not finite.
        """
        with self._noted(task):
            found = self._reward(completion, task.data["answer"])
        return self._score(found)

    async def awaited_score(self, task: Task, completion: str) -> float | Score | None:
        """Return the result of a reward function that is a coroutine; see `score`."""
        with self._noted(task):
            awaited: Any = self._reward(completion, task.data["answer"])
            found = await awaited
        return self._score(found)

    def _noted(self, task: Task) -> AbstractContextManager[None]:
        return noted(f"raised by the reward function {self._name}; row {task.task_id}")

    def _score(self, found: Any) -> float | Score | None:  # noqa: ANN401 - whatever was returned
        return (
            found
            if found is None or isinstance(found, Score)
            else number(found, f"what the reward {self._name} returned")
        )


class AwaitedQuestions:
    """Questions whose answers a coroutine scores, so that many are scored concurrently.

    Attributes:
        scoring_s: Maximum seconds to score one answer; 0 without such a limit.
    """

    name = "question_answer"

    def __init__(
        self,
        questions: QuestionAnswer,
        score: Callable[[Task, str], Awaitable[float | Score | None]],
        scoring_s: float = 0.0,
    ) -> None:
        self._questions, self._score, self.scoring_s = questions, score, scoring_s

    async def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the questions of a split."""
        return self._questions.tasks(split, seed)

    def messages(self, task: Task) -> Sequence[Message]:
        """Return the question, after the system message."""
        return self._questions.messages(task)

    async def score(self, task: Task, completion: str) -> float | Score | None:
        """Return the coroutine's result."""
        return await self._score(task, completion)
