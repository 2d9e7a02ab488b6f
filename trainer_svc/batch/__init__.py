"""Training rows and micro-batches of them: data that every other package of the trainer reads."""
