"""Environments on an OpenEnv server, over its WebSocket protocol.

BSD-3-Clause: https://github.com/meta-pytorch/OpenEnv, version 0.10. Only the package `websockets` is needed here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.environments.base import Message, Task, Turn
from sluice.environments.libraries.imports import library
from sluice.errors import ConfigError

_HELD_OUT = 1 << 30
"""First seed of the tasks for evaluation. Tasks to train on have lower seeds."""

_TEXTS = ("prompt", "message", "text", "content", "observation", "response", "result")
"""Fields of an observation that may be its text. The first one present is used, unless the settings name a field."""

_OPEN_S = 30.0
_MOST_BYTES = 16 << 20


class OpenEnv:
    """Plays the environment of an OpenEnv server. Each task is a seed of its `reset`.

    Args:
        url: URL of the server, such as ``ws://127.0.0.1:8000``; http and https mean ws and wss.
        action: Field of the action that gets the assistant's text. Empty: the text is the whole action as JSON.
        observation: Field of the observation to show to the model. Empty: its text if it has one, else the whole observation as JSON.
        fixed: Further fields of each action.
        reset: Further fields of each reset.
        train: Number of tasks to train on.
        evaluate: Number of tasks to evaluate on.
        system: System message; none if empty.
    """

    name = "openenv"

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        observation: str = "",
        fixed: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
        train: int = 4096,
        evaluate: int = 256,
        system: str = "",
    ) -> None:
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in {"ws", "wss", "http", "https"}:
            raise ConfigError(f"the URL of an OpenEnv server begins with ws:// or http://, not {url!r}")
        self._connect = library("websockets.asyncio.client", "websockets").connect
        self._url = f"{scheme.replace('http', 'ws')}://{rest.rstrip('/')}"
        if not self._url.endswith("/ws"):
            self._url += "/ws"
        self._action, self._observation, self._system = action, observation, system
        self._fixed, self._reset = dict(fixed or {}), dict(reset or {})
        self._counts = {"train": train, "eval": evaluate}

    async def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return seeds. The seeds for evaluation are the same for every seed of a run."""
        if split not in self._counts:
            raise ConfigError(f"openenv has the splits train and eval, not {split!r}")
        count = self._counts[split]
        draw = random.Random(seed)  # noqa: S311 - tasks, not secrets
        seeds = range(_HELD_OUT, _HELD_OUT + count) if split == "eval" else draw.sample(range(_HELD_OUT), count)
        return [Task(str(each), {"seed": each}) for each in seeds]

    async def reset(self, task: Task, seed: int) -> OpenEnvEpisode:  # the task's own seed decides
        """Open a connection, which has its own session, and begin an episode."""
        try:
            socket = await self._connect(self._url, open_timeout=_OPEN_S, max_size=_MOST_BYTES)
        except (OSError, TimeoutError) as error:
            raise RuntimeError(f"no OpenEnv server answers at {self._url}: {error}") from error
        episode = OpenEnvEpisode(socket, self._asked, self._shown)
        try:
            first = await episode.exchange("reset", {**self._reset, "seed": task.data["seed"]})
        except BaseException:
            await socket.close()
            raise
        episode.messages = [{"role": "system", "content": self._system}] if self._system else []
        episode.messages.append({"role": "user", "content": self._shown(first["observation"])})
        return episode

    def _asked(self, said: str) -> Mapping[str, Any]:
        """Return the action for the assistant's text.

        Raises:
            ValueError: if the text should be JSON, and is not.
        """
        if self._action:
            return {**self._fixed, self._action: said}
        found = json.loads(said)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")  # noqa: TRY004 - one kind of error for the model
        return {**self._fixed, **found}

    def _shown(self, observation: Any) -> str:  # noqa: ANN401 - anything that JSON has
        """Return the text of an observation to show to the model."""
        if isinstance(observation, dict):
            names = (self._observation,) if self._observation else _TEXTS
            for name in names:
                if isinstance(observation.get(name), str):
                    return str(observation[name])
            if self._observation and self._observation in observation:
                observation = observation[self._observation]
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)


class OpenEnvEpisode:
    """An episode over a connection."""

    messages: list[Message]

    def __init__(self, socket: Any, asked: Any, shown: Any) -> None:  # noqa: ANN401 - of the library; two methods
        self._socket, self._asked, self._shown = socket, asked, shown

    async def step(self, completion: str) -> Turn:
        """Send the assistant's action. If its text is not an action, the answer says why."""
        try:
            action = self._asked(completion)
        except ValueError as error:
            return Turn(messages=[{"role": "user", "content": f"This is no action: {error}"}])
        found = await self.exchange("step", action)
        truncated = _is_truncated(found)
        done, reward = bool(found.get("done")) or _ends_by_a_limit(found), found.get("reward")
        answer = [] if done else [{"role": "user", "content": self._shown(found["observation"])}]
        return Turn(
            messages=answer, reward=None if reward is None else float(reward), done=done, truncated=done and truncated
        )

    async def close(self) -> None:
        """Close the connection, and with it the session."""
        await self._socket.close()

    async def exchange(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message, and return the data of the answer.

        Raises:
            RuntimeError: if the server refuses it.
        """
        await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
        answer = json.loads(await self._socket.recv())
        if answer.get("type") != "observation":
            raise RuntimeError(f"the OpenEnv server answered {kind} with {json.dumps(answer)[:500]}")
        found: Mapping[str, Any] = answer["data"]
        return found


def _ends_by_a_limit(found: Mapping[str, Any]) -> bool:
    """Return whether a limit ends the episode, even without `done`.

    With Gymnasium's pair of `terminated` and `truncated`, `done` may mean only `terminated`. Without `terminated`,
    `truncated` in an observation before the last one says that its text was cut, as in the results of tools.
    """
    observation = found.get("observation")
    pair = isinstance(observation, dict) and "terminated" in observation and observation.get("truncated") is True
    return pair or found.get("truncated") is True


def _is_truncated(found: Mapping[str, Any]) -> bool:
    """Return whether a limit ended an episode that has ended. The protocol has no field for this, so servers use one of these places."""
    observation = found.get("observation")
    places = [found, found.get("metadata"), observation]
    if isinstance(observation, dict):
        places.append(observation.get("metadata"))
    return any(
        place.get(name) is True
        for place in places
        if isinstance(place, dict)
        for name in ("truncated", "TimeLimit.truncated")
    )
