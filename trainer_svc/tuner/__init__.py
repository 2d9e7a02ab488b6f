"""`sluice tuner`: training of several adapters on one base model, for callers with loops of their own."""
