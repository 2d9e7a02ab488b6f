"""PyTorch's random state as tensors, so that a resumed run draws what an uninterrupted one would."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["random_state", "restore_random_state"]


def random_state(rank: int = 0) -> dict[str, torch.Tensor]:
    """State of this process's CPU generator, and of its GPU's where there is one, under its rank."""
    state = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(tensors: Mapping[str, torch.Tensor], rank: int = 0) -> None:
    """Put the generators back; those that the tensors do not name stay as they are."""
    if (cpu := tensors.get(f"random.cpu.{rank}")) is not None:
        torch.set_rng_state(cpu)
    if torch.cuda.is_available() and (cuda := tensors.get(f"random.cuda.{rank}")) is not None:
        torch.cuda.set_rng_state(cuda)
