"""wordle: find a secret word in six guesses; each letter of a guess is marked. Fewer guesses earn a higher reward."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from pathlib import Path

from sluice.environments import Message, Task, Turn

__all__ = ["GUESSES", "Game", "Wordle", "marks", "spelt", "vocabulary"]

GUESSES = 6
"""Guesses in a game."""

LETTERS = 5
"""Letters in a word."""

HELD_OUT_SHARE = 4
"""One game in four is held out: a secret word with the first guess, or the secret word alone where no guess is given."""

LAST_GUESS = 0.5
"""Reward of a word that is found with a guess more than there are; the first guess earns 1, those between in equal steps."""

CLOSE = 0.4
"""Most that a game earns without the word: this share of the best guess, in which a + counts 1 and a ? counts a half."""

IN_BRACKETS = re.compile(r"\[\s*([a-z]+)\s*\]", re.IGNORECASE)

RULES = f"""\
Find my secret word of {LETTERS} letters. You have {GUESSES} guesses. End each of your turns with a guess in square brackets, such as [{{example}}].
I mark each letter of a guess: + stands in this place of my word, ? stands in another place, - does not stand in it."""

ASK_AGAIN = f"I need a word of {LETTERS} letters in square brackets."


class Wordle:
    """The environment.

    Args:
        words: Number of words, taken from `words.txt` in an order that never changes; 0 takes all.
        brief: Leave out the rules, and answer with marks alone ("+-?--" in place of "c+ r- a? n- e-"). For models that learned the game from
            demonstrations, with a token for each character.
        opened: Whether the first guess of each game is given, another one in each: so there are many games with few words.
    """

    name = "wordle"

    def __init__(self, words: int = 0, brief: bool = False, opened: bool = False) -> None:
        self._words, self._brief, self._opened = vocabulary(words), brief, opened

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return the games of a split; the held-out ones are the same for every seed.

        Args:
            split: ``train`` or ``eval``.
            seed: Seed of the order.

        Raises:
            ValueError: if there is no such split.
        """
        if split not in {"train", "eval"}:
            raise ValueError(f"wordle has the splits train and eval, not {split!r}")
        games = [(secret, first) for secret in self._words for first in (self._words if self._opened else ("",))]
        chosen = [game for game in games if game[0] != game[1] and held_out("".join(game)) == (split == "eval")]
        random.Random(f"wordle/{seed if split == 'train' else 0}").shuffle(chosen)  # noqa: S311 - an order, not a secret
        return [Task(f"{first}-{secret}".strip("-"), {"secret": secret, "first": first}) for secret, first in chosen]

    def reset(self, task: Task, seed: int) -> Game:
        """Begin a game."""
        rules = "play" if self._brief else RULES.format(example=self._words[0])
        return Game(task.data["secret"], task.data["first"], rules, self._brief)


class Game:
    """One game."""

    def __init__(self, secret: str, first: str, rules: str, brief: bool) -> None:
        self._secret, self._brief, self._guesses, self._best = secret, brief, 0, 0.0
        opening = [rules, f"[{first}]", self._shown(first, self._mark(first))] if first else [rules]
        self.messages: list[Message] = [{"role": "user", "content": "\n".join(opening)}]

    def step(self, completion: str, last: bool = False) -> Turn:
        """Mark a guess. A reply without one costs a guess, too. A game that the run ends earns what it has so far."""
        guess = guessed(completion)
        marked = self._mark(guess)
        found = guess == self._secret
        reward = 1 - (1 - LAST_GUESS) * (self._guesses - 1) / GUESSES if found else CLOSE * self._best
        over = found or self._guesses == GUESSES
        if over or last:
            measures = {"solved": float(found), "guesses": float(self._guesses)}
            return Turn(reward=reward, done=True, truncated=not over, metrics=measures)
        return Turn(messages=[{"role": "user", "content": self._shown(guess, marked) if guess else ASK_AGAIN}])

    def _shown(self, guess: str, marked: str) -> str:
        return marked if self._brief else spelt(guess, marked)

    def _mark(self, guess: str) -> str:
        """Count a guess and return its marks; none for a reply without one."""
        self._guesses += 1
        marked = marks(guess, self._secret) if guess else ""
        self._best = max(self._best, (marked.count("+") + marked.count("?") / 2) / LETTERS)
        return marked


def guessed(completion: str) -> str:
    """Return the last word in square brackets in small letters, or nothing if it does not have five letters."""
    found = IN_BRACKETS.findall(completion)
    return found[-1].lower() if found and len(found[-1]) == LETTERS else ""


def marks(guess: str, secret: str) -> str:
    """Return a mark for each letter of a guess: + in its place, ? elsewhere in the word, - not in it.

    A letter has no more + and ? than the secret word has of it; + comes first, then ? from left to right.
    """
    left = Counter(secret)
    left.subtract(letter for letter, right in zip(guess, secret, strict=True) if letter == right)
    found = ""
    for letter, right in zip(guess, secret, strict=True):
        if letter == right:
            found += "+"
        elif left[letter] > 0:
            left[letter] -= 1
            found += "?"
        else:
            found += "-"
    return found


def spelt(guess: str, marked: str) -> str:
    """Return a guess with its marks: "c+ r- a? n- e-"."""
    return " ".join(f"{letter}{mark}" for letter, mark in zip(guess, marked, strict=True))


def vocabulary(count: int = 0) -> list[str]:
    """Return the first words of the list in the order of their digests; 0 returns all."""
    words = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split()
    words.sort(key=digest)
    return words[: count or None]


def held_out(game: str) -> bool:
    """Return whether a game is held out, by its digest."""
    return digest(game)[-1] % HELD_OUT_SHARE == 0


def digest(word: str) -> bytes:
    """Return a digest, which decides a word's place in the list and a game's split."""
    return hashlib.blake2b(word.encode(), digest_size=8).digest()
