"""Environments pose tasks and score attempts. A run finds its environment by name."""

from sluice.environments.base import Environment, Message, Score, Task, Turn

__all__ = ["Environment", "Message", "Score", "Task", "Turn"]
