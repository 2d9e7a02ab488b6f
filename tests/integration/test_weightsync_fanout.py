"""One root, two relays, eight receivers: what crosses the links, and what happens when a relay dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import cache, partial
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from relay_stack import Engine, Link, Node, linked, push, running
from safetensors.torch import load_file
from weightsync_stack import RESOURCE, RUN, equal_bits, eventually

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.publisher import WeightPublisher
from weightsync.receive.sources import SourceLimits

pytestmark = pytest.mark.slow

RECEIVERS = 8
QUIET = {"lease_s": 30.0, "heartbeat_s": 2.0}
"""Little is said but what has to be, so that the bytes that are counted are those of versions."""
LINKED = {"connect_to": partial(connect, security=SecurityConfig()), "local_files": False}
PATIENT = SourceLimits(look_s=1.0, answer_s=60.0, fallback_s=60.0)
"""A relay that is slow is not left: the bytes of each link are counted."""
EAGER = SourceLimits(look_s=1.0, fallback_s=1.0, retry_s=1.0, ban_s=1.0)


class Tree:
    """The services and the links between them."""

    def __init__(self, root: Node, relays: list[Node], links: list[Link]) -> None:
        self.root, self.relays, self.links = root, relays, links

    async def settle(self) -> None:
        """Wait until the root knows both relays."""
        run = await self.root.serving.runs.open(RESOURCE)
        addresses = {relay.target for relay in self.relays}
        await eventually(
            lambda: addresses <= {each.address for each in run.describe_relays(self.root.serving.runs.clock())}
        )

    def received(self) -> list[int]:
        return [link.received for link in self.links]


@pytest_asyncio.fixture
async def tree(tmp_path: Path) -> AsyncIterator[Tree]:
    async with AsyncExitStack() as stack:
        root = await stack.enter_async_context(running(Node(tmp_path / "root", **QUIET)))
        links = [await stack.enter_async_context(linked(root.target)) for _ in range(2)]
        relays = [
            await stack.enter_async_context(running(Node(tmp_path / f"relay-{index}", upstream=link.address, **QUIET)))
            for index, link in enumerate(links)
        ]
        grown = Tree(root, relays, links)
        await grown.settle()
        yield grown


async def start(stack: AsyncExitStack, tree: Tree, stage_dir: Path, sources: SourceLimits = PATIENT) -> list[Engine]:
    """Receivers that share no staged copies, as if each had a host of its own; each has found a relay when this returns."""
    engines = [Engine(f"replica-{index}") for index in range(RECEIVERS)]
    for engine in engines:
        receiving = engine.receiving(tree.root.target, stage_dir / engine.name, sources=sources, **LINKED)
        await stack.enter_async_context(receiving)
    relayed = [await relay.serving.runs.open(RESOURCE) for relay in tree.relays]
    await eventually(lambda: sum(run.watchers for run in relayed) == RECEIVERS, 60)
    return engines


async def served(engines: list[Engine], version: Version) -> None:
    await eventually(lambda: all(engine.version == version for engine in engines), 60)


@cache
def model(seed: int, layers: int = 32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"layer.{index}": torch.randn(1 << 17, generator=random).bfloat16() for index in range(layers)}


def trained(tensors: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """One value in ten moves by a few steps of its precision."""
    random = torch.Generator().manual_seed(step)
    moved = {}
    for name, tensor in tensors.items():
        bits = tensor.clone().view(torch.int16)
        bits += torch.randint(-3, 4, bits.shape, generator=random) * (torch.rand(bits.shape, generator=random) < 0.1)
        moved[name] = bits.view(torch.bfloat16)
    return moved


async def size_of(node: Node, version: Version) -> int:
    async with connect(node.target, SecurityConfig()) as channel:
        stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
        response = await stub.GetManifest(pb.GetManifestRequest(run=RESOURCE, version=version.to_proto()), timeout=30)
    return response.manifest.size_bytes


async def test_the_root_sends_a_dense_version_once_per_relay(tree: Tree, tmp_path: Path) -> None:
    tensors = model(0)
    size = sum(tensor.nbytes for tensor in tensors.values())
    async with AsyncExitStack() as stack:
        engines = await start(stack, tree, tmp_path / "shm")
        run = await tree.root.serving.runs.open(RESOURCE)
        await eventually(lambda: run.watchers == 2, 60)  # every receiver found a relay, which takes a while under load
        before = tree.received()
        await push(tree.root, Version(1, 1), tensors)
        await served(engines, Version(1, 1))
        await eventually(lambda: run.watchers == 2, 60)
    for count, earlier in zip(tree.received(), before, strict=True):
        assert size <= count - earlier < size * 1.02
    assert all(equal_bits(engine.tensors, tensors) for engine in engines)


async def test_the_root_sends_a_delta_once_per_relay(tree: Tree, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(connect(tree.root.target, SecurityConfig()))
        publisher = WeightPublisher(channel, RUN)
        engines = await start(stack, tree, tmp_path / "shm")
        tensors = model(0)
        await publish(publisher, Version(1, 1), tensors)
        await served(engines, Version(1, 1))
        for number in (2, 3):
            tensors = trained(tensors, number)
            before = tree.received()
            await publish(publisher, Version(1, number), tensors)
            await served(engines, Version(1, number))
            size = await size_of(tree.root, Version(1, number))
            assert size < sum(tensor.nbytes for tensor in tensors.values()) / 2
            for count, earlier in zip(tree.received(), before, strict=True):
                assert size <= count - earlier < size * 1.02
    assert all(equal_bits(engine.tensors, tensors) for engine in engines)
    for relay in tree.relays:
        newest = relay.directory / "v1.3" / "model.safetensors"
        await eventually(newest.exists)
        assert equal_bits(load_file(newest), tensors)


async def publish(publisher: WeightPublisher, version: Version, tensors: dict[str, torch.Tensor]) -> None:
    update = await asyncio.to_thread(publisher.encode, version, tensors)
    await publisher.publish(update, deadline_s=60)


async def test_receivers_of_a_dead_relay_take_the_next_version_from_elsewhere(tree: Tree, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engines = await start(stack, tree, tmp_path / "shm", EAGER)
        await push(tree.root, Version(1, 1), model(1, layers=4))
        await served(engines, Version(1, 1))
        await tree.relays[0].stop()
        await push(tree.root, Version(1, 2), model(2, layers=4))
        await served(engines, Version(1, 2))
        await tree.relays[1].stop()
        await push(tree.root, Version(1, 3), model(3, layers=4))
        await served(engines, Version(1, 3))
    assert all(equal_bits(engine.tensors, model(3, layers=4)) for engine in engines)
