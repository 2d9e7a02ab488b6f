"""A weight service in a process of its own, receivers in ours, and the weights that travel between them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import torch

from benchmarks.children import free_port, service
from sluice.cli.init_model import ModelShape, init_model
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.versions import BASE, Version
from weightsync.publisher import WeightPublisher
from weightsync.receiver import ReceiverOptions, WeightReceiver
from weightsync.staged import ApplyError, ApplyReport, Engine, HeldVersions, StagedAdapter, StagedVersion

__all__ = [
    "MODEL_200M",
    "RUN",
    "StagedOnly",
    "WeightStack",
    "dense_bytes",
    "model_200m",
    "neighbour",
    "random_weights",
    "receiving",
    "serves",
    "weight_service",
]

RUN = "bench"
DEADLINE_S = 300.0


class WeightStack:
    """A service that is up.

    Attributes:
        target: Its address.
        channel: To it.
        publisher: Pushes to it.
    """

    def __init__(self, target: str, channel: grpc.aio.Channel, *, local: bool) -> None:
        self.target = target
        self.channel = channel
        self.publisher = WeightPublisher(channel, RUN, local=local)

    async def push(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> float:
        """Publish a version; returns when the transfer began, which is after the comparison with the version before."""
        update = await asyncio.to_thread(self.publisher.encode, version, tensors, deadline_s=DEADLINE_S)
        begun = time.perf_counter()
        await self.publisher.publish(update, deadline_s=DEADLINE_S)
        return begun


@contextlib.asynccontextmanager
async def weight_service(
    directory: Path, *arguments: str, local: bool = False, name: str = "weightsync"
) -> AsyncIterator[WeightStack]:
    """Run ``sluice weightsync`` until the block ends.

    Args:
        directory: For its versions and its log.
        arguments: Further words of its command line.
        local: Hand files over in shared memory in place of sockets.
        name: Of its part of the directory.
    """
    target = f"127.0.0.1:{free_port()}"
    words = [
        f"--run={RUN}",
        f"--output-dir={directory / name}",
        "--log-level=warning",
        f"--server.port={target.rpartition(':')[2]}",
        *arguments,
    ]
    log = directory / f"{name}.log"
    async with service("weightsync", *words, health=target, log=log), connect(target, SecurityConfig()) as channel:
        yield WeightStack(target, channel, local=local)


@contextlib.asynccontextmanager
async def receiving(
    target: str,
    stage_dir: Path,
    engine: Engine,
    *,
    replica: str = "replica-0",
    local: bool = False,
) -> AsyncIterator[WeightReceiver]:
    """A receiver that follows until the block ends."""
    async with connect(target, SecurityConfig()) as channel:
        receiver = WeightReceiver(channel, RUN, replica, stage_dir, engine, options=ReceiverOptions(local_files=local))
        task = asyncio.create_task(receiver.run_forever())
        try:
            yield receiver
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await receiver.close()


class StagedOnly:
    """An engine that applies to nothing: what is measured ends when the version is staged."""

    serves_adapters = False

    def __init__(self) -> None:
        self.version = BASE

    def held(self) -> HeldVersions:
        """Return the version that was staged last."""
        return HeldVersions(self.version, self.version)

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Take note of the version."""
        self.version = staged.version
        return ApplyReport(staged.version, 0.0, 0.0)

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        """Refuse: nothing here pushes adapters."""
        raise ApplyError(f"{staged.version} is an adapter")


async def serves(receivers: list[WeightReceiver], version: Version) -> None:
    """Return when all of them serve the version.

    Raises:
        TimeoutError: after the deadline.
    """
    deadline = time.monotonic() + DEADLINE_S
    while any(receiver.status().serving != version for receiver in receivers):
        if time.monotonic() > deadline:
            raise TimeoutError(f"version {version} was not in service within {DEADLINE_S:g} s")
        await asyncio.sleep(0.002)


MODEL_200M = ModelShape(hidden=1024, layers=16, heads=16, kv_heads=8, head_dim=64, mlp=3072)
"""202 million parameters, all but 0.3 million of them in the layers."""

WEIGHT_SCALE = 0.02


def model_200m(directory: Path) -> Path:
    """Make the model in bf16, if it is not there yet, and return its directory."""
    if not (directory / "config.json").exists():
        init_model(directory, MODEL_200M, dtype="bfloat16")
    return directory


def random_weights(elements: int, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Normal weights in matrices of 16 M elements under names of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    rows, width, tensors = 16_384, 1024, {}
    for index in range(-(-elements // (rows * width))):
        tensor = torch.empty(rows, width).normal_(0.0, WEIGHT_SCALE, generator=generator)
        tensors[f"model.layers.{index}.mlp.up_proj.weight"] = tensor.to(dtype)
    return tensors


def neighbour(tensors: dict[str, torch.Tensor], *, seed: int, changed: float = 0.01) -> dict[str, torch.Tensor]:
    """The next version: a share of the weights moved by one unit in the last place, as a small step of AdamW does."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in tensors.items():
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        drawn = torch.empty(bits.shape, dtype=torch.int16).random_(generator=generator)  # 0 to 32,767
        moved[name] = (bits + (drawn < 32_768 * changed)).to(bits.dtype).view(tensor.dtype)
    return moved


def dense_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of a dense copy."""
    return sum(tensor.nbytes for tensor in tensors.values())
