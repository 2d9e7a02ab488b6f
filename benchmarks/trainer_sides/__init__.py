"""The sides of `sluice bench trainer`: one process each, with the same model and the same batch."""
