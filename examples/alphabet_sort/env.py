"""alphabet_sort: sort names; then more names come, and all of them are to be sorted again, the new ones marked with a *."""

from __future__ import annotations

import difflib
import hashlib
import random
import re
from collections.abc import Iterator
from itertools import islice

from sluice.environments import Message, Task, Turn

__all__ = ["AlphabetSort", "Sorting", "expected", "request", "tasks_of"]

FIRST = """\
Ada Alan Alma Anna Bea Ben Bob Carl Cleo Cora Dan Dora Earl Ed Ella Emma Finn Flora Fred Gina Greg Gus Hal Hana Hugo Ian Ida Iris Ivan Jack Jane
Joe June Karl Kate Kim Lars Lea Leo Lily Max May Mia Milo Nils Nina Nora Olga Omar Otto Pam Paul Pia Ralf Rita Rosa Sam Sara Sven Tara Theo Tom
Uma Vera Vic Walt Will Zoe""".split()  # noqa: SIM905 - shorter than a list

LAST = """\
Abel Adler Baker Bell Bloom Brandt Carver Castle Clay Dale Dawson Drake Eaton Ellis Farmer Finch Forest Gale Garner Grant Hale Harper Hill Ives
Jarvis Jensen Keller Knight Lane Larsen Lowe Marsh Mason Miller Moss Nash Norton Oaks Olsen Palmer Pike Porter Quill Reed Rivers Rowe Sawyer
Shepherd Stone Tanner Thorne Turner Underwood Vance Vogel Walker Waters Weaver Wood Young Zeller""".split()  # noqa: SIM905

HELD_OUT_SHARE = 8
"""One set of names in eight is held out for evaluation."""

LIST_MARK = re.compile(r"^(?:\d+[.)]|[-•])\s+")
"""What some models write before each line of a list."""

RULES = """\
Sort names alphabetically{by}, one on each line. When more names come, sort all of them again, and mark the new ones with a *, such as {example}*.
Answer with the names alone.

"""


class AlphabetSort:
    """The environment.

    Args:
        turns: Turns of an episode.
        most: Most names in a turn. The first turn has at least two.
        last_names: Whether names have two parts, of which a task says by which one to sort.
        rules: Whether the first message explains the task. Models that learned it from demonstrations need it not; it also says whether first or last
            names decide, so names of two parts cannot be sorted without.
        power: The reward of a turn is its similarity to the right answer to this power. A high one makes near misses worth little.
        train_tasks: Number of tasks to train on.
        eval_tasks: Number of held-out tasks.
    """

    name = "alphabet_sort"

    def __init__(
        self,
        *,
        turns: int = 3,
        most: int = 4,
        last_names: bool = True,
        rules: bool = True,
        power: float = 4.0,
        train_tasks: int = 4096,
        eval_tasks: int = 256,
    ) -> None:
        if last_names and not rules:
            raise ValueError("last_names needs rules, which say by which part of the names to sort: set rules = true")
        self._shape = (turns, most, last_names)
        self._rules, self._power = rules, power
        self._sizes = {"train": train_tasks, "eval": eval_tasks}

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return the tasks of a split. The held-out ones are the same for every seed.

        Args:
            split: ``train`` or ``eval``.
            seed: Decides which tasks there are to train on.

        Raises:
            ValueError: if there is no such split.
        """
        if split not in self._sizes:
            raise ValueError(f"alphabet_sort has the splits train and eval, not {split!r}")
        found = tasks_of(split, seed if split == "train" else 0, *self._shape)
        return list(islice(found, self._sizes[split]))

    def reset(self, task: Task, seed: int) -> Sorting:
        """Begin an episode."""
        turns, by = task.data["turns"], task.data["by"]
        rules = RULES.format(by=by and f" by {by} name", example=turns[0][0]) if self._rules else ""
        return Sorting(turns, by, rules, self._power)


class Sorting:
    """One episode."""

    def __init__(self, turns: list[list[str]], by: str, rules: str, power: float) -> None:
        self.messages: list[Message] = [{"role": "user", "content": rules + request(turns[0])}]
        self._turns, self._by, self._power = turns, by, power
        self._past, self._right = 0, 0

    def step(self, completion: str) -> Turn:
        """Compare a list with the right one, and bring more names until there are none."""
        wanted = expected(self._turns[: self._past + 1], self._by)
        similarity = difflib.SequenceMatcher(None, lines(completion), wanted, autojunk=False).ratio()
        self._past += 1
        self._right += similarity == 1
        done = self._past == len(self._turns)
        return Turn(
            messages=[] if done else [{"role": "user", "content": request(self._turns[self._past])}],
            reward=similarity**self._power / len(self._turns),
            done=done,
            metrics={"right_turns": self._right / len(self._turns)},
        )


def request(names: list[str]) -> str:
    """Return a message that brings names."""
    return "\n".join(["Sort:", *names])


def expected(turns: list[list[str]], by: str) -> list[str]:
    """Return the lines of the right answer to the last of some turns. From the second turn on, its own names are marked."""
    fresh = {*turns[-1]} if len(turns) > 1 else set()
    names = sorted((name for turn in turns for name in turn), key=lambda name: name.split()[-1 if by == "last" else 0])
    return [f"{name}*" if name in fresh else name for name in names]


def lines(completion: str) -> list[str]:
    """Return the lines of an answer without blank ones, the marks of a list, and spaces before a *."""
    found = (LIST_MARK.sub("", line.strip()) for line in completion.splitlines())
    return [re.sub(r"\s+\*$", "*", line) for line in found if line]


def tasks_of(split: str, seed: int, turns: int, most: int, last_names: bool) -> Iterator[Task]:
    """Draw tasks of a split for ever, none twice. No two names of a task have a part in common.

    Args:
        split: ``train`` or ``eval``.
        seed: Decides which.
        turns: Turns of a task.
        most: Most names in a turn.
        last_names: Whether names have two parts.
    """
    rng = random.Random(f"alphabet_sort/{split}/{seed}")  # noqa: S311 - tasks, not secrets
    seen: set[str] = set()
    while True:
        counts = [rng.randint(2 if turn == 0 else 1, most) for turn in range(turns)]
        names = rng.sample(FIRST, sum(counts))
        if last_names:
            names = [f"{first} {last}" for first, last in zip(names, rng.sample(LAST, len(names)), strict=True)]
        by = rng.choice(["first", "last"]) if last_names else ""
        same = " ".join(sorted(names))
        if same in seen or held_out(same) != (split == "eval"):
            continue
        seen.add(same)
        left = iter(names)
        yield Task(f"{by} {same}".strip(), {"turns": [list(islice(left, count)) for count in counts], "by": by})


def held_out(names: str) -> bool:
    """Return whether a set of names is held out, by the digest of its sorted names."""
    return hashlib.blake2b(names.encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0
