"""The training engine: a library; no service is needed around it."""
