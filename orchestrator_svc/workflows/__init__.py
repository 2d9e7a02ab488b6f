"""Workflows: how an episode runs, from a task to trajectories."""
