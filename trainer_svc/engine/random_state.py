"""PyTorch's random state as tensors, so that a resumed run draws what an uninterrupted one would."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["random_state", "restore_random_state"]

CPU = "random.cpu"
CUDA = "random.cuda"


def random_state() -> dict[str, torch.Tensor]:
    """State of the CPU's generator, and of the current GPU's where there is one."""
    state = {CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        state[CUDA] = torch.cuda.get_rng_state()
    return state


def restore_random_state(tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the generators back; a checkpoint from a machine without a GPU leaves the GPU's alone."""
    torch.set_rng_state(tensors[CPU])
    if torch.cuda.is_available() and CUDA in tensors:
        torch.cuda.set_rng_state(tensors[CUDA])
