"""The engine that samples with plain transformers: a fixed number of slots in one batch."""
