"""One rank of an engine, as a program: loads a checkpoint of one process, steps, saves, fails, dies; notes what it saw.

Arguments: a directory, then cases such as ``tied/pp``: a directory in it with `model` and its checkpoint `one`, and the axis that
has two processes. Rank, count and rendezvous come from the environment, as torchrun gives them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from sluice.v1 import checkpoint_pb2
from trainer_svc.checkpoint import saver as saving
from trainer_svc.checkpoint.saver import EngineCheckpoints, Saver
from trainer_svc.checkpoint.state import held_slices, read_below, training_state
from trainer_svc.compute_config import ParallelConfig, ParallelDims
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.optimizers import OffloadedAdamW, Optimizers
from trainer_svc.parallel.mesh import Mesh, join, make_mesh

DEADLINE_S = 60.0
LATE_S = 10.0
"""Deadline of a checkpoint that is not written in time on one rank, and of the next one, which is: a quiet machine writes it in
50 ms."""
CONFIG = TrainerConfig(optimizer="muon", lr=1e-2, weight_decay=0.1, device="cpu", threads=1)


def step(engine: TrainEngine) -> None:
    """An optimizer step on gradients that depend on the parameter's name alone."""
    for name, parameter in engine.network.model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    engine.optimizer.step(engine.optimizer_steps)
    engine.optimizer_steps += 1


def fail(*_: object) -> list[Path]:
    raise OSError("No space left on device")


def die(*_: object) -> list[Path]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def relay(layout: str, directory: Path, mesh: Mesh) -> dict[str, object]:
    """Continue from the checkpoint of one process, step, and write a checkpoint from which one process continues."""
    engine = TrainEngine(CONFIG, directory / "model", mesh=mesh)
    checkpoints = EngineCheckpoints(engine)
    checkpoints.load(str(directory / "one"))
    stored = read_below("policy.", directory / "one" / "state")
    held = engine.state_tensors()
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in held.items()}
    same = all(torch.equal(tensor, stored[name]) for name, tensor in whole.items())
    step(engine)
    writing = checkpoints.begin_save(directory / layout)
    step(engine)  # the checkpoint is of the moment before
    writing.result(DEADLINE_S)
    return {
        "same": same,
        "up_proj": [
            list(piece.sizes) for piece in held_slices(held) if piece.name == "model.model.layers.0.mlp.up_proj.weight"
        ],
    }


def offload(directory: Path, mesh: Mesh) -> bool:
    """Return whether AdamW in host memory makes the same steps as AdamW on parts of matrices, and AdamW can continue from its state."""
    config = CONFIG.model_copy(update={"optimizer": "adamw"})
    plain, offloaded = (TrainEngine(config, directory / "model", mesh=mesh) for _ in range(2))
    parameters = list(offloaded.network.model.parameters())
    options = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    offloaded.optimizer = Optimizers(config, [OffloadedAdamW(groups, **options)])
    for engine in (plain, offloaded):
        step(engine)
    checkpoints = EngineCheckpoints(offloaded)
    checkpoints.save(directory / "offloaded")
    resumed = TrainEngine(config, directory / "model", mesh=mesh)
    EngineCheckpoints(resumed).load(directory / "offloaded")
    checkpoints.load(directory / "offloaded")
    for engine in (plain, offloaded, resumed):
        step(engine)
    states = [held_slices(each.state_tensors()) for each in (plain, offloaded, resumed)]
    return all(torch.equal(tensor, other[piece]) for other in states[1:] for piece, tensor in states[0].items())


def late(saver: Saver, engine: TrainEngine, directory: Path) -> list[str]:
    """Begin a checkpoint while only rank 1 still writes the previous one, and begin another when that is over."""
    if dist.get_rank() == 1:
        saver._pending = Future()
    first = save(saver, engine, directory)
    saver._pending = None
    return [first, save(saver, engine, directory)]


def save(saver: Saver, engine: TrainEngine, directory: Path) -> str:
    """Write a checkpoint; what went wrong."""
    begun = saver.begin(
        directory, checkpoint_pb2.CheckpointManifest(), training_state({"policy": engine}, dist.get_rank())
    )
    error = begun.exception(DEADLINE_S)
    return "" if error is None else f"{type(error).__name__}: {error}"


def main() -> None:
    directory, *relays = Path(sys.argv[1]), *sys.argv[2:]
    torch.set_num_threads(1)
    mesh = join(ParallelConfig(), "cpu")
    notes: dict[str, object] = {}
    for each in relays:
        model, axis = each.split("/")
        laid_out = make_mesh(ParallelDims(**{axis: 2}), torch.device("cpu"), timedelta(seconds=DEADLINE_S))
        notes[each] = relay(axis, directory / model, laid_out)
    notes["offload"] = offload(directory / model, mesh)
    engine = TrainEngine(CONFIG, directory / model / "model", mesh=mesh)
    notes["late"] = late(Saver.of(mesh, LATE_S), engine, directory / "late")
    saver = Saver.of(mesh, DEADLINE_S)
    for name, fault in (("full", fail), ("killed", die)):
        if mesh.rank == 1:
            saving.write_slices = fault
        notes[name] = save(saver, engine, directory / name)
    (directory / f"{mesh.rank}.json").write_text(json.dumps(notes))
    os._exit(0)  # a group whose member was killed cannot be taken down in order


if __name__ == "__main__":
    main()
