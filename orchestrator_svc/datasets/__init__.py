"""Data sets of single-turn tasks: questions with their answers."""
