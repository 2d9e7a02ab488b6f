"""Hyper-parameters of the update, the same on every side."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["ADAM_EPS", "BATCH", "BETAS", "CLIP", "GRAD_CLIP", "LEARNING_RATE", "NO_DEGENERATE", "side_arguments"]

LEARNING_RATE = 1e-5
BETAS = (0.9, 0.95)
ADAM_EPS = 1e-8
CLIP = 0.2
"""The ratio is clipped to [1 - CLIP, 1 + CLIP]."""
GRAD_CLIP = 1.0


BATCH = "batch.safetensors"
NO_DEGENERATE = "no_degenerate.safetensors"
"""Files that `prepare` writes: the batch, and the same tokens with rewards of which no group's are all equal."""


def side_arguments(description: str | None) -> argparse.ArgumentParser:
    """What every side is told on its command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--batch", type=Path, required=True, help="file of an UpdateBatch")
    parser.add_argument("--threads", type=int, required=True, help="compute threads")
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="sequences per forward pass, where the side has that"
    )
    return parser
