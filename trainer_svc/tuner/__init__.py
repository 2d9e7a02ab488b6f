"""`sluice tuner`: train several adapters of one base model, for callers with their own training loops."""
