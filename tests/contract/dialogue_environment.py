"""Environments of several turns for the tests of workflows."""

import os
import time

from sluice.environments.base import Task, Turn


class Dialogue:
    """Says "again" until the last turn; the reward of a turn is its number.

    Episodes with an odd seed may hang, which they print, or end their process in the second turn. With `fickle`, messages name the process.
    """

    name = "dialogue"

    def __init__(self, turns=3, odd_seeds_hang=False, odd_seeds_die=False, fickle=False):
        self.turns, self.odd_seeds_hang, self.odd_seeds_die = turns, odd_seeds_hang, odd_seeds_die
        self.word = f"again {os.getpid()}" if fickle else "again"

    def tasks(self, split, seed):
        return [Task("t", {})]

    def reset(self, task, seed):
        if self.odd_seeds_hang and seed % 2:
            print("hangs")
            time.sleep(3600)
        return DialogueEpisode(self.turns, self.word, dies=self.odd_seeds_die and seed % 2)


class Patient(Dialogue):
    """Gives a reward at the end alone: how many turns there were, less a half if the run ended it."""

    def reset(self, task, seed):
        return PatientEpisode(self.turns, self.word, dies=False)


class DialogueEpisode:
    def __init__(self, turns, word, dies):
        self.turns, self.turn, self.word, self.dies = turns, 0, word, dies
        self.messages = [{"role": "user", "content": "go"}]

    def step(self, completion):
        self.turn += 1
        if self.dies and self.turn == 2:
            os._exit(1)
        if self.turn == self.turns:
            return Turn(done=True, reward=float(self.turn))
        return Turn(messages=[{"role": "user", "content": self.word}], reward=float(self.turn))


class PatientEpisode(DialogueEpisode):
    def step(self, completion, last=False):
        turn = super().step(completion)
        if turn.done or last:
            return Turn(
                done=True, truncated=not turn.done, reward=self.turn - 0.5 * last, metrics={"last": float(last)}
            )
        return Turn(messages=turn.messages)
