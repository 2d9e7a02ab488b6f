"""One rank of a sharded engine, as a program: loads a checkpoint of one process, steps, saves, fails, dies; notes what it saw.

Arguments: directory with the checkpoint `one` and for the notes, model. Rank, count and meeting point come from the
environment, as torchrun gives them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from sluice.v1.checkpoint_pb2 import CheckpointManifest
from trainer_svc.checkpoint import saver as saving
from trainer_svc.checkpoint.pieces import held_pieces
from trainer_svc.checkpoint.saver import Saver
from trainer_svc.checkpoint.shards import read_below
from trainer_svc.checkpoint.state import training_state
from trainer_svc.checkpoint.writers import Writers
from trainer_svc.config import ParallelConfig, TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.optimizers import build_optimizers
from trainer_svc.parallel.mesh import join

DEADLINE_S = 60.0
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


def sharded(model: str) -> TrainEngine:
    engine = TrainEngine(CONFIG, model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in engine.network.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(engine.network.model, mesh=mesh)
    engine.optimizer = build_optimizers(CONFIG, engine.network.model, engine.device)
    return engine


def fail(*_: object) -> list[Path]:
    raise OSError("No space left on device")


def die(*_: object) -> list[Path]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def main() -> None:
    directory, model = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    mesh = join(ParallelConfig(), "cpu")
    engine, saver = sharded(model), Saver(Writers.of(mesh, DEADLINE_S), DEADLINE_S)
    saver.load(directory / "one", {"policy": engine})
    stored = read_below("policy.", directory / "one" / "state")
    held = engine.state_tensors()
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in held.items()}
    notes: dict[str, object] = {
        "same": all(torch.equal(tensor, stored[name]) for name, tensor in whole.items()),
        "uneven": sorted(
            {tuple(piece.sizes) for piece in held_pieces(held) if piece.name.endswith("0.mlp.up_proj.weight")}
        ),
    }
    step(engine)

    def save(name: str, meanwhile: Callable[[], None] = lambda: None) -> str:
        state = training_state({"policy": engine}, mesh.rank)
        begun = saver.begin(directory / name, CheckpointManifest(), state, export=engine.export_state)
        meanwhile()
        error = begun.exception(DEADLINE_S)
        return "" if error is None else f"{type(error).__name__}: {error}"

    notes["two"] = save("two", meanwhile=lambda: step(engine))
    for name, fault in (("three", fail), ("four", die)):
        if mesh.rank == 1:
            saving.write_shards = fault
        notes[name] = save(name)
    (directory / f"{mesh.rank}.json").write_text(json.dumps(notes))
    os._exit(0)  # a group whose member was killed cannot be taken down in order


if __name__ == "__main__":
    main()
