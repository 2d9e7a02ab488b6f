"""Rewards: worker processes that score with a time limit, and reward functions to begin with."""
