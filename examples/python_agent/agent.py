"""Plays the guessing game of examples/number_guess with OpenAI's client. `agents.agent` names this class, and `sluice rl` runs it."""

from __future__ import annotations

from typing import Any

import openai

__all__ = ["Guesser"]


class Guesser:
    """An agent. One object plays all episodes of its process, many at a time.

    Args:
        guesses: Most guesses of a game.
    """

    def __init__(self, guesses: int = 6) -> None:
        self.guesses = guesses
        self.client = openai.AsyncOpenAI(api_key="each episode has its own")

    async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        """Play one game; the sooner the number is found, the higher the reward."""
        policy = self.client.with_options(base_url=base_url, api_key=api_key)
        messages: list[Any] = [{"role": "user", "content": f"{data['low']}-{data['high']}"}]
        for turn in range(self.guesses):
            reply = await policy.chat.completions.create(model="policy", messages=messages)
            said = reply.choices[0].message.content or ""
            if not said.isdecimal():
                return 0.0
            if int(said) == data["secret"]:
                return 1 - turn / self.guesses
            hint = "higher" if int(said) < data["secret"] else "lower"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
        return 0.0
