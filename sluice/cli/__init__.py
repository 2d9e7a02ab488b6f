"""The `sluice` program."""
