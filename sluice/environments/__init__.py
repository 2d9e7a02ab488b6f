"""Environments: what poses tasks and scores attempts, and how one is found by its name."""

from sluice.environments.base import Environment, Message, Score, Task, Turn

__all__ = ["Environment", "Message", "Score", "Task", "Turn"]
