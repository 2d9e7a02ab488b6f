"""Episodes that external agents run: who has them, and what was sampled in them."""
