"""The state of training as flat tensors: ``<engine>.model.<name>``, ``<engine>.optimizer.<moment>.<name>``, ``random.<device>.<rank>``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from trainer_svc.checkpoint.shards import read_tensors, stored_tensors
from trainer_svc.engine.random_state import random_state, restore_random_state

__all__ = ["Trained", "restore_state", "training_state"]

SCALARS = "scalars"


class Trained(Protocol):
    """What has weights and an optimizer: a `TrainEngine`."""

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors, by name."""

    def state_scalars(self) -> dict[str, int]:
        """The numbers, by name."""

    def state_room(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """The live tensors that saved ones of these names and global shapes are read into."""

    def restore_scalars(self, scalars: Mapping[str, int]) -> None:
        """Put the numbers back."""


def training_state(engines: Mapping[str, Trained], rank: int) -> dict[str, torch.Tensor]:
    """What a process has to save, where it lies: the next step changes it.

    Args:
        engines: Engines by name, such as ``policy`` and ``critic``; a name has no dot.
        rank: This process, whose random state stands under its number.
    """
    state: dict[str, torch.Tensor] = {}
    for prefix, engine in engines.items():
        state |= {f"{prefix}.{name}": tensor for name, tensor in engine.state_tensors().items()}
        state |= {f"{prefix}.{SCALARS}.{name}": torch.tensor(value) for name, value in engine.state_scalars().items()}
    return state | random_state(rank)


def restore_state(engines: Mapping[str, Trained], directory: Path, rank: int) -> None:
    """Put the state back, from whatever number of processes and layout it was written by.

    The random state of a process that was not there then stays as it is.

    Args:
        engines: Engines by name; engines that the checkpoint has beside them are not read.
        directory: Holds the tensors.
        rank: This process.

    Raises:
        ValueError: if the state is of other engines, models or optimizers; the state is undefined then.
    """
    stored = stored_tensors(directory)
    into: dict[str, torch.Tensor] = {}
    scalars = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in stored.items() if _is_scalar(name)}
    for prefix, engine in engines.items():
        shapes = {
            name.removeprefix(f"{prefix}."): size
            for name, (size, _) in stored.items()
            if name.startswith(f"{prefix}.") and not _is_scalar(name)
        }
        if not shapes:
            raise ValueError(
                f"the checkpoint holds no {prefix!r}: resume with the settings that it was made with, or use a new run name"
            )
        into |= {f"{prefix}.{name}": tensor for name, tensor in engine.state_room(shapes).items()}
    random = {name: torch.empty_like(tensor) for name, tensor in random_state(rank).items() if name in stored}
    read_tensors(directory, into | scalars | random)
    for prefix, engine in engines.items():
        head = f"{prefix}.{SCALARS}."
        engine.restore_scalars({key.removeprefix(head): int(scalars[key]) for key in scalars if key.startswith(head)})
    restore_random_state(random, rank)


def _is_scalar(name: str) -> bool:
    return name.split(".")[1] == SCALARS
