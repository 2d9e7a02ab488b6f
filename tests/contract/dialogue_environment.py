"""Environments of several turns for the tests of workflows."""

import time

from orchestrator_svc.envs.base import Task, Turn


class Dialogue:
    """Says "again" until the last turn; the reward of a turn is its number. Episodes with an odd seed may hang."""

    name = "dialogue"

    def __init__(self, turns=3, odd_seeds_hang=False):
        self.turns, self.odd_seeds_hang = turns, odd_seeds_hang

    def tasks(self, split, seed):
        return [Task("t", {})]

    def reset(self, task, seed):
        if self.odd_seeds_hang and seed % 2:
            time.sleep(3600)
        return DialogueEpisode(self.turns)


class DialogueEpisode:
    def __init__(self, turns):
        self.turns, self.turn = turns, 0
        self.messages = [{"role": "user", "content": "go"}]

    def step(self, completion):
        self.turn += 1
        if self.turn == self.turns:
            return Turn(done=True, reward=float(self.turn))
        return Turn(messages=[{"role": "user", "content": "again"}], reward=float(self.turn))
