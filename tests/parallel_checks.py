"""What else several processes of a trainer must agree on; run by every rank of `parallel_rank.py`, noted by rank 0."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from tiny_policy import ragged_batch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from sluice.cli.init_model import ModelShape, init_model
from trainer_svc.batch.rows import MicroBatch, Outputs, TrainingRow, count_loss_tokens
from trainer_svc.compute_config import MESH_AXES, ParallelDims
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.loading import distribute, load_network
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective
from trainer_svc.parallel.mesh import SINGLE, Mesh, make_mesh
from trainer_svc.update.policy import PolicyUpdate

TIMEOUT_S = 60.0


def checks(models: Path, scratch: Path) -> dict[str, Any]:
    """Every check, by name."""
    count = dist.get_world_size()
    sharded = make_mesh(ParallelDims(dp_shard=count), torch.device("cpu"), timedelta(seconds=TIMEOUT_S))
    cut = make_mesh(ParallelDims(tp=count), torch.device("cpu"), timedelta(seconds=TIMEOUT_S))
    return {
        "exchanges": exchanges(models, sharded),
        "refused": refused(models, sharded),
        "update refused": update_refused(models, sharded),
        "other rows": other_rows(models, cut),
        "not finite": not_finite(models, sharded),
        "pieces": pieces(models, sharded),
        "export": export(models, scratch, cut),
        "bfloat16": half(models, sharded),
        "memory": memory(scratch, sharded),
    }


def likelihood(outputs: Outputs, _: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -outputs.logprobs.sum(), {}


def engine(model: Path, mesh: Mesh, **settings: Any) -> TrainEngine:
    return TrainEngine(
        TrainerConfig(**({"lr": 1e-3, "device": "cpu", "token_budget": 100} | settings)), model, mesh=mesh
    )


def share(mesh: Mesh, seed: int = 3) -> list[TrainingRow]:
    return ragged_batch(seed=seed)[mesh.rank :: mesh.dims.data_parallel]


def gathered(value: object) -> list[Any]:
    """What every rank has to say."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


@contextmanager
def counted(*names: str) -> Iterator[dict[str, int]]:
    """How often functions of torch.distributed are called."""
    counts = dict.fromkeys(names, 0)
    kept = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return kept[name](*arguments, **options)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def connected() -> dict[str, list[list[int]]]:
    """The groups that this rank has connected once a mesh is made, by the axis that has all ranks."""
    count, reduce = dist.get_world_size(), dist.all_reduce
    found: dict[str, list[list[int]]] = {}
    for axis in MESH_AXES:
        used = found[axis] = []

        def noting(tensor: torch.Tensor, *, group: dist.ProcessGroup, used: list[list[int]] = used) -> None:
            used.append(dist.get_process_group_ranks(group))
            reduce(tensor, group=group)
            assert tensor.tolist() == [len(used[-1])]

        dist.all_reduce = noting
        try:
            make_mesh(ParallelDims(**{axis: count}), torch.device("cpu"), timedelta(seconds=TIMEOUT_S))
        finally:
            dist.all_reduce = reduce
    return found


def exchanges(models: Path, mesh: Mesh) -> dict[str, dict[str, int]]:
    """Gathers of weights and sums of gradients in one step."""
    found = {}
    for name, settings in {"default": {}, "kept": {"reshard": False}, "sharded": {"accumulate": "sharded"}}.items():
        trainer = engine(models / "qwen3", mesh, parallel=settings)
        with counted("reduce_scatter_single", "all_gather_single") as counts:
            metrics = trainer.train_batch(share(mesh), likelihood, count_loss_tokens)
        found[name] = counts | {"micro_batches": metrics.micro_batches}
    return found


def refused(models: Path, mesh: Mesh) -> list[str]:
    """Return each rank's error for a batch in which the rows of one rank contain a token that does not exist."""
    rows = share(mesh)
    if mesh.rank == mesh.dims.world_size - 1:
        rows[0] = replace(rows[0], input_ids=rows[0].input_ids + 10_000)
    try:
        engine(models / "qwen3", mesh).train_batch(rows, likelihood, count_loss_tokens)
    except ValueError as error:
        return gathered(str(error))
    return gathered("")


def update_refused(models: Path, mesh: Mesh) -> list[str]:
    """Return each rank's error for an update in which one rank has a row without a reward."""
    rows = [replace(each, reward=1.0) for each in share(mesh)]
    if mesh.rank == mesh.dims.world_size - 1:
        rows[0] = replace(rows[0], reward=None)
    objective = Objective.of(ObjectiveConfig(preset="reinforce_pp", kl_coef=0.0))
    try:
        PolicyUpdate(engine(models / "qwen3", mesh), objective).apply(rows)
    except ValueError as error:
        return gathered(str(error))
    return gathered("")


def other_rows(models: Path, mesh: Mesh) -> list[str]:
    """What each rank says of rows that it should share with another one that has different ones."""
    try:
        engine(models / "qwen3", mesh).forward(ragged_batch(seed=mesh.rank))
    except ValueError as error:
        return gathered(str(error))
    return gathered("")


def not_finite(models: Path, mesh: Mesh) -> list[tuple[bool, bool]]:
    """Whether each rank skips a step whose loss is not finite on one of them, and keeps its weights."""
    trainer = engine(models / "qwen3", mesh)
    before = {name: each.clone() for name, each in trainer.named_tensors().items()}

    def loss(outputs: Outputs, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total, sums = likelihood(outputs, batch)
        return (total * torch.inf if mesh.rank == 0 else total), sums

    skipped = trainer.train_batch(share(mesh), loss, count_loss_tokens).skipped
    after = trainer.named_tensors()
    return gathered((skipped, all(torch.equal(before[name], after[name]) for name in before)))


def pieces(models: Path, mesh: Mesh) -> dict[str, Any]:
    """Return the names of each rank's tensors, the number of their elements on all ranks, and that of the whole model."""
    found = engine(models / "tied", mesh).live_tensors()
    local = sum(each.to_local().numel() if isinstance(each, DTensor) else 0 for each in found.values())
    return {
        "names": gathered(sorted(found)),
        "elements": sum(gathered(local)),
        "whole": sum(each.numel() for each in found.values()),
    }


def export(models: Path, scratch: Path, mesh: Mesh) -> dict[str, bool]:
    """Return whether transformers reads the same weights from the export as the engine trains."""
    trainer = engine(models / "tied", mesh)
    trainer.train_batch(ragged_batch(seed=3), likelihood, count_loss_tokens)
    directory = scratch / "export"
    trainer.export_hf(directory)
    weights = trainer.named_tensors()
    if mesh.rank:
        return {}
    read = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    return {
        "same weights": all(torch.equal(read[name], tensor) for name, tensor in weights.items()),
        "tied": bool(torch.equal(read["lm_head.weight"], read["model.embed_tokens.weight"])),
    }


def half(models: Path, mesh: Mesh) -> dict[str, Any]:
    """Compare log-probabilities and loss in bfloat16, with float32 masters, with the results of one process."""
    trainer = engine(models / "qwen3", mesh, dtype="bfloat16")
    loss = trainer.train_batch(share(mesh), likelihood, count_loss_tokens).loss
    masters = {str(each.dtype) for each in trainer.network.model.parameters()}
    one = engine(models / "qwen3", SINGLE, dtype="bfloat16")
    untrained = (engine(models / "qwen3", mesh, dtype="bfloat16"), one)
    forwards = zip(*(each.forward(share(mesh)) for each in untrained), strict=True)
    same = all(torch.equal(ours.nan_to_num(), alone.nan_to_num()) for ours, alone in forwards)
    return {
        "same": same,
        "loss": loss,
        "of one": one.eval_batch(ragged_batch(seed=3), likelihood, count_loss_tokens).loss,
        "masters": [*masters],
    }


def memory(scratch: Path, mesh: Mesh) -> dict[str, list[int]]:
    """Return the peak bytes of each rank while it loads a model, and the bytes of the whole model."""
    shape = ModelShape(hidden=512, layers=4, heads=8, kv_heads=8, head_dim=64, mlp=2048)
    large = scratch / "large"
    parameters = init_model(large, shape, dtype="bfloat16") if mesh.rank == 0 else 0
    dist.barrier()
    with peak_bytes() as own_share:
        distribute(load_network(str(large), torch.device("cpu"), lazy=(0, 1)), mesh)
    with peak_bytes() as whole:
        distribute(load_network(str(large), torch.device("cpu")), mesh)
    return {"float32": 4 * parameters, "own share": gathered(own_share[0]), "whole": gathered(whole[0])}


@contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """The growth of this process's memory; pages of files do not count, which the system takes back when it needs them."""

    def held() -> int:
        memory = psutil.Process().memory_info()
        return int(memory.rss - memory.shared)

    gc.collect()
    before, peak, done = held(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], held() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield peak
    finally:
        done.set()
        watching.join()
