"""Task families of reasoning-gym, which generates the tasks and scores the answers.

Apache-2.0: https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.environments.base import Message, Task
from sluice.environments.libraries.imports import library
from sluice.errors import ConfigError

_HELD_OUT_SEED = 0x5EED
"""Seed of the tasks for evaluation. They are the same for every run."""


class ReasoningGym:
    """Asks the questions of one task family of reasoning-gym.

    Args:
        family: Name of the family, such as ``leg_counting``.
        options: Settings of the family, such as ``{"max_animals": 4}``.
        train: Number of tasks to train on. Tasks whose question also occurs in the evaluation are left out.
        evaluate: Number of tasks to evaluate on.
        tag: The answer is the text between ``<tag>`` and ``</tag>``. Empty: the whole completion.
        system: System message. By default it asks for the tag.
    """

    def __init__(
        self,
        family: str,
        *,
        options: Mapping[str, Any] | None = None,
        train: int = 4096,
        evaluate: int = 256,
        tag: str = "answer",
        system: str | None = None,
    ) -> None:
        self._library = library("reasoning_gym", "reasoning-gym")
        families = sorted(self._library.factory.DATASETS)
        if family not in families:
            raise ConfigError(f"reasoning-gym has no family {family!r}; it has {', '.join(families)}")
        self.name = f"reasoning_gym.{family}"
        self._family, self._options = family, dict(options or {})
        self._counts = {"train": train, "eval": evaluate}
        self._tag = tag
        asks = f"Give the answer alone between <{tag}> and </{tag}>." if tag else ""
        self._system = asks if system is None else system
        self._datasets: dict[tuple[int, int], Any] = {}

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the tasks of the split ``train`` or ``eval``."""
        count = self._count(split)
        if split == "eval":
            seed = _HELD_OUT_SEED
            held_out: set[str] = set()
        else:
            # With adjacent seeds the tasks of reasoning-gym overlap, because it adds the index to the seed.
            seed = random.Random(f"reasoning_gym/{seed}").getrandbits(31)  # noqa: S311 - tasks, not secrets
            held_out = {entry["question"] for entry in self._dataset(_HELD_OUT_SEED, self._count("eval"))}
        tasks, asked = [], set(held_out)
        for index, entry in enumerate(self._dataset(seed, count)):
            if entry["question"] in asked:
                continue
            asked.add(entry["question"])
            data = {"question": entry["question"], "seed": seed, "index": index, "count": count}
            tasks.append(Task(f"{seed}-{index}", data))
        if not tasks:
            raise ConfigError(
                f"every question of {self._family} is also asked in evaluation: its options leave too few questions; widen them, or lower evaluate"
            )
        return tasks

    def messages(self, task: Task) -> Sequence[Message]:
        """Return the question, after the system message."""
        question = {"role": "user", "content": task.data["question"]}
        return [{"role": "system", "content": self._system}, question] if self._system else [question]

    def score(self, task: Task, completion: str) -> float:
        """Return the family's score for the answer, 0 to 1."""
        answer: str | None = completion.strip()
        if self._tag:
            answer = self._library.utils.extract_answer(completion, tag_name=self._tag)
        dataset = self._dataset(task.data["seed"], task.data["count"])
        return float(dataset.score_answer(answer, dataset[task.data["index"]]))

    def _count(self, split: str) -> int:
        if split not in self._counts:
            raise ConfigError(f"reasoning_gym has the splits train and eval, not {split!r}")
        return self._counts[split]

    def _dataset(self, seed: int, count: int) -> Any:  # noqa: ANN401 - the library's class
        """Return a data set of the family. It generates each task when the task is read."""
        key = (seed, count)
        if key not in self._datasets:
            try:
                self._datasets[key] = self._library.create_dataset(self._family, size=count, seed=seed, **self._options)
            except (TypeError, ValueError, AssertionError) as error:
                raise ConfigError(f"reasoning-gym refuses the options of {self._family}: {error}") from error
        return self._datasets[key]
