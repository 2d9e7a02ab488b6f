"""What of an engine lies on disk: checkpoints of its own, and directories that transformers, PEFT and vLLM load.

Every process of a trainer makes the same calls, but for `export_state`.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sluice.v1.checkpoint_pb2 import CheckpointManifest
from trainer_svc.checkpoint.shards import read_below
from trainer_svc.checkpoint.state import training_state
from trainer_svc.engine.adapter_export import export_adapter
from trainer_svc.engine.export import export_hf, whole_tensors

if TYPE_CHECKING:
    from trainer_svc.engine.engine import TrainEngine

__all__ = ["POLICY", "SAVE_S", "begin_save", "export_engine", "export_state", "load", "save"]

POLICY = "policy"
"""An engine's name in a checkpoint of its own; that of the policy in a checkpoint of the service."""

SAVE_S = 1800.0
"""Seconds that a process waits for the others to write their shares."""


def save(engine: TrainEngine, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint, and wait until it is on disk; see `begin_save`.

    Raises:
        OSError: if a process could not write its share, or half an hour did not suffice.
    """
    writing = begin_save(engine, directory, dtype=dtype)
    engine.saver.wait()
    writing.result()


def begin_save(
    engine: TrainEngine, directory: str | Path, *, dtype: torch.dtype | None = None
) -> Future[CheckpointManifest]:
    """Copy the state, and write a checkpoint in the background; training may go on when this returns.

    Each process writes its share; the directory appears whole or not at all.

    Args:
        engine: What is trained.
        directory: What to write, on a file system that all processes share; one that is there is replaced.
        dtype: Precision of the Hugging Face directory `hf` in it; None keeps float32.

    Returns:
        Done when the checkpoint is on disk, or holds what went wrong: ask it before the next one, and before the end.
    """
    state = training_state({POLICY: engine}, engine.mesh.rank)
    manifest = CheckpointManifest(optimizer_steps=engine.optimizer_steps)
    return engine.saver.begin(Path(directory), manifest, state, export=partial(export_state, engine, dtype=dtype))


def load(engine: TrainEngine, directory: str | Path) -> None:
    """Go on from a checkpoint, whatever number of processes wrote it; one of a service is one too.

    Raises:
        CheckpointDamagedError: if it is not whole.
        ValueError: if it is of another model or optimizer.
    """
    engine.saver.load(Path(directory), {POLICY: engine})


def export_engine(engine: TrainEngine, directory: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a Hugging Face model directory, or a PEFT adapter where one is trained; it appears whole or not at all.

    Rank 0 writes, and the directory is there when it returns on rank 0.

    Raises:
        FileExistsError: if the directory exists.
        ValueError: if the layers lie in several stages.
    """
    if engine.mesh.dims.pp > 1:
        raise ValueError("the layers lie in several stages: save a checkpoint, whose directory `hf` has all of them")
    tensors = engine.network.model.state_dict()
    if engine.adapter is not None:
        tensors = {name: each for name, each in engine.network.model.named_parameters() if each.requires_grad}
    weights = whole_tensors(tensors, keep=engine.mesh.rank == 0)
    if not engine.mesh.rank:
        _write(engine, Path(directory), dtype, weights)


def export_state(engine: TrainEngine, state: Path, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write a Hugging Face model directory of the weights in a checkpoint; any thread may call it.

    Args:
        engine: What is trained.
        state: Where the checkpoint's tensors are, in whatever layout.
        directory: What to write.
        dtype: Precision of floating-point tensors; None keeps float32.
    """
    _write(engine, directory, dtype, read_below(f"{POLICY}.model.", state))


def _write(engine: TrainEngine, directory: Path, dtype: torch.dtype | None, weights: dict[str, torch.Tensor]) -> None:
    if engine.adapter is not None:
        export_adapter(engine.adapter, engine.model_dir, directory, dtype, weights)
    else:
        export_hf(engine.network.model, engine.model_dir, directory, dtype, weights)
