"""One rank of a trainer of several processes, as a program: trains in every layout and compares with one process.

Arguments: directory of the models, file for the results of rank 0, layouts. A layout names its axes, and the cases if they
are not all: ``dp_shard=2,tp=2/grpo qwen3,one sequence by aot_eager``; ``checks`` and ``groups`` run what `parallel_checks.py` has. Rank, count and meeting point come from the environment, as torchrun gives them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_checks import checks, connected, gathered
from tiny_policy import ragged_batch
from torch.distributed.tensor import DTensor

from trainer_svc.batch.rows import MicroBatch, Outputs, TrainingRow, count_loss_tokens
from trainer_svc.compute_config import ParallelConfig, ParallelDims
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.loading import compile_layers, distribute, load_network
from trainer_svc.engine.lora import attach_adapter
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective
from trainer_svc.parallel.balance import balance
from trainer_svc.parallel.mesh import SINGLE, Mesh, join, make_mesh
from trainer_svc.parallel.sharding import local_slice
from trainer_svc.update.policy import PolicyUpdate

TIMEOUT_S = 60.0
STEPS = 2

Step = Callable[[TrainEngine, list[TrainingRow]], Any]


@dataclass(frozen=True)
class Case:
    """One training to compare: the model, the step and the settings."""

    model: str
    step: Step
    rows: list[TrainingRow]
    settings: dict[str, Any]
    head: Any = "language"


def rl(**objective: Any) -> Step:
    def step(engine: TrainEngine, rows: list[TrainingRow]) -> Any:
        return PolicyUpdate(engine, Objective.of(ObjectiveConfig(**objective))).apply(rows).metrics

    return step


def values_and_tokens(engine: TrainEngine, rows: list[TrainingRow]) -> Any:
    def loss(outputs: Outputs, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        squared = (outputs.values - batch.advantages) ** 2
        return (squared - outputs.logprobs).sum(), {"squared": squared.detach().sum()}

    return engine.train_batch(rows, loss, count_loss_tokens)


def values_alone(engine: TrainEngine, rows: list[TrainingRow]) -> Any:
    def loss(outputs: Outputs, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return ((outputs.values - batch.advantages) ** 2).sum(), {}

    return engine.train_batch(rows, loss, count_loss_tokens)


GRPO = rl(preset="grpo", kl_coef=0.05, entropy_coef=0.01)
GSPO = rl(preset="gspo", eps_low=0.5, eps_high=0.5, proximal="bypass")
CASES = {
    "grpo qwen3": Case("qwen3", GRPO, ragged_batch(seed=4), {"token_budget": 150}),
    "gspo llama": Case(
        "llama", GSPO, ragged_batch(seed=5), {"token_budget": 150, "parallel": {"accumulate": "sharded"}}
    ),
    "grpo tied": Case("tied", GRPO, ragged_batch(seed=6), {"token_budget": 150, "gradient_checkpointing": True}),
    "grpo smollm3": Case("smollm3", GRPO, ragged_batch(seed=11), {"token_budget": 150}),
    "grpo latent": Case("latent", GRPO, ragged_batch(seed=12), {"token_budget": 150}),
    "values qwen3": Case("qwen3", values_and_tokens, ragged_batch(seed=7), {"token_budget": 300}, "both"),
    "critic llama": Case("llama", values_alone, ragged_batch(seed=9), {"token_budget": 300}, "value"),
    "adapter qwen3": Case("qwen3", GRPO, ragged_batch(seed=10), {"token_budget": 300, "lora": {"rank": 4}}),
    "one sequence": Case("llama", GRPO, ragged_batch(seed=8)[:1], {"parallel": {"reshard": False}}),
}

LOADED = ("gspo llama", "grpo tied", "values qwen3", "critic llama", "adapter qwen3")
"""Cases whose models are also compared with models that each rank reads as a whole."""


def settings(case: Case) -> TrainerConfig:
    defaults = {"lr": 1e-3, "eps": 1e-6, "device": "cpu", "grad_clip": 0.5, "threads": 1}
    return TrainerConfig(**(defaults | case.settings))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@dataclass
class Run:
    """The results of some steps."""

    facts: list[dict[str, float]]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    forward: list[torch.Tensor]
    evaluated: float


def differently_loaded(case: Case, models: Path, mesh: Mesh) -> list[str]:
    """Return the tensors of any process that differ in any bit from those of a model that was read whole and then laid out."""

    def local(*, read: bool) -> dict[str, tuple[torch.Tensor, bool]]:
        torch.manual_seed(0)
        network = load_network(
            str(models / case.model), torch.device("cpu"), head=case.head, lazy=None if read else (0, 1)
        )
        assert (network.files is None) == read
        network, _ = attach_adapter(network, settings(case).lora)
        model = distribute(network, mesh).model
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: (local_slice(each)[0], each.requires_grad) for name, each in found.items()}

    parts, whole = local(read=False), local(read=True)
    differing = [
        name
        for name in parts.keys() | whole.keys()
        if not (name in parts and name in whole and parts[name][1] == whole[name][1])
        or not torch.equal(parts[name][0], whole[name][0])
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, differing)
    return sorted({name for names in everyone for name in names})


def train(case: Case, models: Path, mesh: Mesh, backend: str = "") -> Run:
    engine = TrainEngine(settings(case), models / case.model, mesh=mesh, head=case.head)
    if backend:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        compile_layers(engine.network.model, backend)
    rows = mine(case.rows, mesh)
    gradients: list[dict[str, torch.Tensor]] = []

    def keep(*_: object) -> None:
        gradients.append(
            {name: whole(each.grad) for name, each in engine.network.model.named_parameters() if each.requires_grad}
        )

    engine.optimizer.parts[0].register_step_pre_hook(keep)
    forward = engine.forward(rows)
    facts = [known(case.step(engine, rows)) for _ in range(STEPS)]
    evaluated = engine.eval_batch(rows, lambda outputs, _: (-outputs.main.sum(), {}), count_loss_tokens)
    weights = of_all_stages(engine.named_tensors(), mesh)
    return Run(facts, [of_all_stages(each, mesh) for each in gradients], weights, forward, evaluated.loss)


def of_all_stages(tensors: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Return the tensors of this process and of the processes with the other layers. Tensors that two stages hold must be equal."""
    if mesh.stages is None:
        return tensors
    parts: list[Any] = [None] * mesh.dims.pp
    dist.all_gather_object(parts, tensors, group=mesh.stages)
    merged: dict[str, torch.Tensor] = {}
    for part in parts:
        assert all(torch.equal(merged[name], part[name]) for name in merged.keys() & part.keys())
        merged |= part
    return merged


def known(metrics: Any) -> dict[str, float]:
    names = ("loss", "grad_norm", "tokens", "loss_tokens", "sequences")
    measured = {name: value for name, value in metrics.measured.items() if name in ("entropy", "kl", "mismatch_kl")}
    return {name: float(getattr(metrics, name)) for name in names} | measured | dict(metrics.sums)


def mine(rows: list[TrainingRow], mesh: Mesh) -> list[TrainingRow]:
    share = balance(rows, mesh.dims.data_parallel)[mesh.dims.data_rank(mesh.rank)]
    return [rows[place] for place in share]


@cache
def alone(name: str, models: Path) -> Run:
    return train(CASES[name], models, SINGLE)


def relative(found: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    return float((found - expected).norm() / max(float(expected.norm()), least, 1e-30))


def compiled(mesh: Mesh) -> dict[str, float]:
    """Whether a rank ran its layers as they are, or compiled them more often than another one with the same layers."""
    graphs = gathered(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    alike = len(set(graphs)) == 1 or mesh.stages is not None
    return {"not compiled": float(min(graphs) == 0), "compiled more often": float(not alike)}


def compare(name: str, models: Path, mesh: Mesh) -> dict[str, float]:
    """Largest relative differences from one process, by what is compared; ``case by backend`` compiles layers."""
    name, _, backend = name.partition(" by ")
    more = {}
    if name in LOADED and not backend:
        more["other weights"] = float(len(differently_loaded(CASES[name], models, mesh)))
    found = train(CASES[name], models, mesh, backend)
    if backend:
        more |= compiled(mesh)
    if mesh.rank:
        return {}
    expected = alone(name, models)
    facts = {
        fact: max(
            abs(a[fact] - b[fact]) / max(abs(b[fact]), 1e-3) for a, b in zip(found.facts, expected.facts, strict=True)
        )
        for fact in expected.facts[0]
    }
    gradients = 0.0
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        total = float(torch.cat([each.flatten() for each in other.values()]).norm())
        gradients = max(gradients, *(relative(one[each], other[each], 1e-2 * total) for each in other))
    places = balance(CASES[name].rows, mesh.dims.data_parallel)[0]
    forward = [
        float((a - expected.forward[place]).nan_to_num().abs().max())
        for a, place in zip(found.forward, places, strict=True)
    ]
    return {
        **facts,
        "gradients": gradients,
        "weights": max(relative(found.weights[each], expected.weights[each]) for each in expected.weights),
        **more,
        "same names": float(found.weights.keys() != expected.weights.keys()),
        "forward": max(forward, default=0.0),
        "evaluated": abs(found.evaluated - expected.evaluated) / abs(expected.evaluated),
    }


def dims_of(layout: str) -> ParallelDims:
    return ParallelDims(**{axis: int(size) for axis, size in (part.split("=") for part in layout.split(","))})


def main() -> None:
    models, results, *layouts = sys.argv[1:]
    torch.set_num_threads(1)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # from there on layers would run as they are
    count = int(os.environ["WORLD_SIZE"])
    join(ParallelConfig(dp_replicate=1, dp_shard=count, timeout_s=TIMEOUT_S), "cpu")
    found: dict[str, dict[str, Any]] = {}
    try:
        for layout in layouts:
            if layout == "checks":
                found[layout] = checks(Path(models), Path(results).parent)
                continue
            if layout == "groups":
                found[layout] = connected()
                continue
            axes, _, cases = layout.partition("/")
            mesh = make_mesh(dims_of(axes), torch.device("cpu"), timedelta(seconds=TIMEOUT_S))
            found[axes] = {name: compare(name, Path(models), mesh) for name in (cases.split(",") if cases else CASES)}
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        if dist.get_rank() == 0:
            Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
