"""The engine's half: pulls, patches, verifies, stages and has applied."""
