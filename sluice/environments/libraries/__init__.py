"""Environments that others wrote, each played as its own library has it. The library need only be in the interpreter of the processes."""
