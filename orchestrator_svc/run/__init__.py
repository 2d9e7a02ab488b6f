"""The run: which task is next, how its episodes are played and scored, and how batches of them reach the trainer."""
