"""The training engine, from a model directory to an optimizer step: a library that needs no service."""
