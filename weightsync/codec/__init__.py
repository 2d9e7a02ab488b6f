"""How the difference of two versions of a tensor is written, exactly; the format is in docs/delta-format.md."""
