"""Faults of the weight path: real processes, killed or damaged at every phase of the protocol, and what becomes of the versions."""
