"""What the programs that update in turns have in common: hyper-parameters, command line, commands, and peak memory."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil

__all__ = [
    "ADAM_EPS",
    "BATCH",
    "BETAS",
    "CLIP",
    "GRAD_CLIP",
    "LEARNING_RATE",
    "NO_DEGENERATE",
    "UPDATE",
    "UPDATE_S",
    "Commands",
    "PeakMemory",
    "side_arguments",
]

LEARNING_RATE = 1e-5
BETAS = (0.9, 0.95)
ADAM_EPS = 1e-8
CLIP = 0.2
"""The ratio is clipped to [1 - CLIP, 1 + CLIP]."""
GRAD_CLIP = 1.0

BATCH = "batch.safetensors"
NO_DEGENERATE = "no_degenerate.safetensors"
"""The two files that `prepare` writes: the batch, and the same tokens with rewards that differ within every group."""

UPDATE = "update"
UPDATE_S = 300.0
"""Seconds that an update may take."""


def side_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return the command line that every side takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--batch", type=Path, required=True, help="file of an UpdateBatch")
    parser.add_argument("--threads", type=int, required=True, help="compute threads")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences per forward pass; ours: tokens")
    return parser


class Commands:
    """A side's end of the pipe: commands come on standard input, answers go to standard output, one JSON object a line.

    What libraries print goes to standard error from now on.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        sys.stdout.flush()
        os.dup2(2, 1)

    def wait(self) -> bool:
        """Block until the next command to update; return False when no more will come."""
        return sys.stdin.readline().strip() == UPDATE

    def answer(self, **measured: Any) -> None:  # noqa: ANN401 - numbers and strings
        """Send one line."""
        self._answers.write(json.dumps(measured) + "\n")


class PeakMemory:
    """The largest resident set since `restart`, above what the process held when this object was made.

    Make it after the imports and before the model is loaded, so that weights count and libraries do not.
    """

    def __init__(self) -> None:
        self._before = psutil.Process().memory_info().rss

    @staticmethod
    def restart() -> None:
        """Forget the peak so far; see proc(5), clear_refs."""
        Path("/proc/self/clear_refs").write_text("5")

    @property
    def bytes(self) -> int:
        """The peak above the start."""
        lines = Path("/proc/self/status").read_text().splitlines()
        peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return peak_kib * 1024 - self._before
