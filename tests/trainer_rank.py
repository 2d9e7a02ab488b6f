"""One rank of a sharded trainer, as a program: publishes versions of a small model and writes down the outcomes.

Arguments: layout (fsdp, tp, both), address of the weight service, directory for its notes, scenario.
Rank, count and meeting point come from the environment, as torchrun gives them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sluice.config import SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.versions import Version
from weightsync.publisher import WeightPublisher

RUN = "test-run"
WIDTH, INNER, VOCABULARY = 16, 22, 37
"""Sizes that no number of ranks divides evenly."""

VERSIONS = 3
DEADLINE_S = 250.0
SHORT_S = 10.0
"""Deadline of a publication that is bound to miss it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)


class Model(nn.Module):
    """Embedding, two blocks, a head that shares the embedding's weights, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(0))
        self.to(torch.bfloat16)


def step(model: nn.Module) -> None:
    """Change the model in the same way for every layout: each value depends only on itself, and some change only in their last bit."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.sin() * 2**-10)


def whole_state(versions: int) -> list[dict[str, torch.Tensor]]:
    """The state of a process that holds all of the model, after each version; tied weights once."""
    model = Model()
    states = []
    for _ in range(versions):
        states.append({name: each.clone() for name, each in model.state_dict().items() if name != "head.weight"})
        step(model)
    return states


def parallel_model(layout: str) -> nn.Module:
    count = dist.get_world_size()
    model = Model()
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (count,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    grid = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if layout == "both":
        for block in model.blocks:
            fully_shard(block, mesh=grid["data"])
        fully_shard(model, mesh=grid["data"])
    return model


async def written(note: Path) -> None:
    """Stay alive and say nothing until the other rank has written a file."""
    while not note.exists():  # noqa: ASYNC110, ASYNC240 - a file of another process
        await asyncio.sleep(0.05)


async def run(layout: str, target: str, directory: str, scenario: str) -> list[dict[str, object]]:
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=DEADLINE_S))
    channel = connect(target, SecurityConfig())
    publisher = WeightPublisher(channel, RUN, chunk_bytes=500, group=group)
    model = parallel_model(layout)
    notes: list[dict[str, object]] = []
    for number in range(1, VERSIONS + 1):
        tensors = dict(model.state_dict())
        if scenario == "refuses" and number == 2 and rank == 1:
            tensors["steps"] = torch.tensor(0, dtype=torch.complex64)
        if scenario == "dies" and number == 2 and rank == 1:
            await written(Path(directory) / "0.published")  # it may still receive messages about version 1
            os.kill(os.getpid(), signal.SIGKILL)
        if scenario == "interrupted" and number == 2 and rank == 1:
            notes.append({"number": number, "error": "interrupted"})
            continue
        if scenario == "silent" and number == 2 and rank == 1:
            await written(Path(directory) / "0.json")
            return notes
        deadline_s = SHORT_S if scenario == "silent" and number > 1 else DEADLINE_S
        try:
            report = await publisher.update(Version(1, number), tensors, deadline_s=deadline_s)
        except (SluiceError, ValueError) as error:
            notes.append({"number": number, "error": getattr(error, "reason", "") or str(error)})
        else:
            notes.append({"number": number, "kind": report.kind, "bytes": report.bytes_sent, "digest": report.digest})
            (Path(directory) / f"{rank}.published").touch()
        step(model)
    await channel.close()
    return notes


def main() -> None:
    layout, target, directory, scenario = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    notes = asyncio.run(run(layout, target, directory, scenario))
    path = Path(directory) / f"{dist.get_rank()}.json"
    path.write_text(json.dumps(notes))
    os._exit(0)  # a group whose member was killed cannot be taken down in order


if __name__ == "__main__":
    main()
