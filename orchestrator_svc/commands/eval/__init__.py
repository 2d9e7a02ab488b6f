"""`sluice eval`: play the tasks of an environment with a model, and score them."""
