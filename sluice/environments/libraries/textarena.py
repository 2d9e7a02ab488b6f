"""Games of TextArena for one player.

MIT: https://github.com/LeonGuertler/TextArena
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sluice.environments.base import Message, Task, Turn
from sluice.environments.libraries.imports import library
from sluice.errors import ConfigError

_HELD_OUT = 1 << 30
"""First seed of the games for evaluation. Games to train on have lower seeds."""

_RAW = "-raw"
"""Ending of the names of games that give each message once. Other games repeat the whole game in each observation."""

_Result = TypeVar("_Result")


class TextArena:
    """Plays a game of TextArena for one player. Each task is a seed.

    Args:
        game: Name of a game for one player, such as ``GuessTheNumber-v0``.
        options: Keyword arguments of `textarena.make`, such as ``{"max_turns": 8}``.
        train: Number of games to train on.
        evaluate: Number of games to evaluate on.
        system: System message; none if empty.
    """

    def __init__(
        self,
        game: str,
        *,
        options: Mapping[str, Any] | None = None,
        train: int = 4096,
        evaluate: int = 256,
        system: str = "",
    ) -> None:
        self._library = library("textarena", "textarena")
        self.name = f"textarena.{game}"
        self._game, self._options = game.removesuffix(_RAW) + _RAW, dict(options or {})
        self._counts, self._system = {"train": train, "eval": evaluate}, system
        known = sorted(
            each.removesuffix(_RAW) for each in self._library.envs.registration.ENV_REGISTRY if each.endswith(_RAW)
        )
        if self._game.removesuffix(_RAW) not in known:
            raise ConfigError(f"TextArena has no game {game!r}; it has {', '.join(known)}")

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the games of the split ``train`` or ``eval``. The games for evaluation are the same for every seed."""
        if split not in self._counts:
            raise ConfigError(f"textarena has the splits train and eval, not {split!r}")
        count = self._counts[split]
        draw = random.Random(seed)  # noqa: S311 - games, not secrets
        seeds = range(_HELD_OUT, _HELD_OUT + count) if split == "eval" else draw.sample(range(_HELD_OUT), count)
        return [Task(str(each), {"seed": each}) for each in seeds]

    def reset(self, task: Task, seed: int) -> Game:  # the task's own seed determines the whole game
        """Begin a game."""
        return Game(self._library, self._game, self._options, int(task.data["seed"]), self._system)


class Game:
    """A game in progress."""

    def __init__(self, textarena: Any, game: str, options: Mapping[str, Any], seed: int, system: str) -> None:  # noqa: ANN401 - a module
        self._textarena = textarena
        self._random: object = None
        self._seat = 0
        self._game = self._alone(lambda: self._begun(game, options, seed))
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages.append({"role": "user", "content": self._alone(self._observed)})

    def step(self, completion: str) -> Turn:
        """Make a move. The reward is the game's, and comes at its end."""
        return self._alone(lambda: self._moved(completion))

    def _begun(self, game: str, options: Mapping[str, Any], seed: int) -> Any:  # noqa: ANN401 - the library's class
        try:
            begun = self._textarena.make(game, **options)
            begun.reset(num_players=1, seed=seed)
        except (AssertionError, TypeError) as error:
            raise ConfigError(
                f"TextArena cannot begin {game.removesuffix(_RAW)} with one player and {dict(options)}: {error}"
            ) from error
        return begun

    def _moved(self, completion: str) -> Turn:
        done, _ = self._game.step(completion)
        if not done:
            return Turn(messages=[{"role": "user", "content": self._observed()}])
        rewards, info = self._game.close()
        said = info[self._seat]
        measures = {"turns": float(said["turn_count"]), "invalid_move": float(said["invalid_move"])}
        return Turn(reward=float(rewards[self._seat]), done=True, metrics=measures)

    def _observed(self) -> str:
        """Return the text of the game since the last move, without the player's own words."""
        _, observed = self._game.get_observation()
        return "\n".join(text for sender, text, _ in observed if sender != self._seat)

    def _alone(self, call: Callable[[], _Result]) -> _Result:
        """Call the game with its own random state, because it draws from the generator that the whole process shares."""
        shared = random.getstate()
        try:
            if self._random is not None:
                random.setstate(self._random)  # type: ignore[arg-type]  # what getstate gave
            return call()
        finally:
            self._random = random.getstate()
            random.setstate(shared)
