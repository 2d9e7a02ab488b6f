"""Environments: what poses tasks and scores attempts, and how one is found by its name."""
