"""The trainer's half: compares, encodes and pushes."""
