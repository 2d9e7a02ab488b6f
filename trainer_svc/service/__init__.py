"""The trainer as a service: batches come in, versions, checkpoints and step reports go out."""
