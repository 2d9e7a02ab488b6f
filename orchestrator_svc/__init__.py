"""The run: draws tasks, runs episodes, scores them and feeds the trainer."""
