"""The trainer: packs trajectories, applies an objective, steps the optimizer, publishes weights."""
