"""Engines find the nearest source, and the root again when it fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from relay_stack import Engine, Node, push, running, sources
from weightsync_stack import RESOURCE, equal_bits, eventually, weights

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.versions import Version
from weightsync.receive.sources import SourceLimits
from weightsync.receiver import PolicyMode

pytestmark = pytest.mark.slow

FAST = {"lease_s": 1.5, "heartbeat_s": 0.2}
EAGER = {
    "connect_to": partial(connect, security=SecurityConfig()),
    "sources": SourceLimits(look_s=0.2, fallback_s=0.3, retry_s=0.1, ban_s=0.2),
}


@pytest_asyncio.fixture
async def root(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(Node(tmp_path / "root", **FAST)) as node:
        yield node


@pytest_asyncio.fixture
async def relay(root: Node, tmp_path: Path) -> AsyncIterator[Node]:
    async with running(Node(tmp_path / "relay", upstream=root.target, **FAST)) as node:
        await listed(root, node)
        yield node


async def listed(root: Node, *relays: Node) -> None:
    """Wait until the root knows its relays."""
    run = await root.serving.runs.open(RESOURCE)
    addresses = {relay.target for relay in relays}
    await eventually(lambda: addresses <= {each.address for each in run.describe_relays(root.serving.runs.clock())})


async def watchers(node: Node) -> int:
    return (await sources(node))[0].watchers


async def test_an_engine_takes_versions_from_the_relay(root: Node, relay: Node, tmp_path: Path) -> None:
    engine = Engine("replica")
    async with engine.receiving(root.target, tmp_path / "shm", **EAGER):
        await push(root, Version(1, 1), weights(1))
        await eventually(lambda: engine.version == Version(1, 1))
        own, relayed = [await node.serving.runs.open(RESOURCE) for node in (root, relay)]
        await eventually(lambda: (own.watchers, relayed.watchers) == (1, 1))
    assert equal_bits(engine.tensors, weights(1))


async def test_an_engine_goes_to_a_relay_that_comes_later(root: Node, tmp_path: Path) -> None:
    engine = Engine("replica")
    async with engine.receiving(root.target, tmp_path / "shm", **EAGER):
        await push(root, Version(1, 1), weights(1))
        await eventually(lambda: engine.version == Version(1, 1))
        async with running(Node(tmp_path / "late", upstream=root.target, **FAST)) as late:
            run = await late.serving.runs.open(RESOURCE)
            await eventually(lambda: run.watchers == 1)
            await push(root, Version(1, 2), weights(2))
            await eventually(lambda: engine.version == Version(1, 2))


async def test_engines_fall_back_to_the_root_and_return(root: Node, relay: Node, tmp_path: Path) -> None:
    engines = [Engine(f"replica-{index}") for index in range(3)]
    own = await root.serving.runs.open(RESOURCE)
    async with (
        engines[0].receiving(root.target, tmp_path / "shm", **EAGER),
        engines[1].receiving(root.target, tmp_path / "shm", **EAGER),
        engines[2].receiving(root.target, tmp_path / "shm", **EAGER),
    ):
        await push(root, Version(1, 1), weights(1))
        await eventually(lambda: all(engine.version == Version(1, 1) for engine in engines))
        relayed = await relay.serving.runs.open(RESOURCE)
        await eventually(lambda: relayed.watchers == 3)  # one that had no answer in time came by way of the root
        await relay.stop()
        await push(root, Version(1, 2), weights(2))
        await eventually(lambda: all(engine.version == Version(1, 2) for engine in engines))
        await eventually(lambda: own.watchers == 3)
        await relay.start()
        await eventually(lambda: own.watchers == 1)
        await push(root, Version(1, 3), weights(3))
        await eventually(lambda: all(engine.version == Version(1, 3) for engine in engines))
    assert all(equal_bits(engine.tensors, weights(3)) for engine in engines)


async def test_a_version_that_only_the_root_holds_is_had_from_there(root: Node, relay: Node, tmp_path: Path) -> None:
    await push(root, Version(1, 1), weights(1))
    await push(root, Version(1, 2), weights(2))
    await eventually(lambda: relay.newest() == Version(1, 2))
    run = await relay.serving.runs.open(RESOURCE)
    engine = Engine("replica")
    async with engine.receiving(root.target, tmp_path / "shm", **EAGER) as receiver:
        await eventually(lambda: engine.version == Version(1, 2))
        if Version(1, 1) in run.versions:
            await relay.serving.runs.delete(run, Version(1, 1))
        receiver.set_policy(PolicyMode.TARGET, Version(1, 1), owner="test", ttl_s=60)
        await eventually(lambda: engine.version == Version(1, 1))


async def test_a_relay_that_gets_nothing_new_is_left(root: Node, relay: Node, tmp_path: Path) -> None:
    engine = Engine("replica")
    stuck = {**EAGER, "sources": SourceLimits(look_s=0.1, fallback_s=0.3, retry_s=0.1, stall_s=0.5)}
    async with engine.receiving(root.target, tmp_path / "shm", **stuck):
        await push(root, Version(1, 1), weights(1))
        await eventually(lambda: engine.version == Version(1, 1))
        run = await relay.serving.runs.open(RESOURCE)
        async with run.commit_lock:  # the relay answers, and commits nothing
            await push(root, Version(1, 2), weights(2))
            await eventually(lambda: engine.version == Version(1, 2))


async def test_a_relay_that_gives_damaged_bytes_is_left(root: Node, relay: Node, tmp_path: Path) -> None:
    await push(root, Version(1, 1), weights(1))
    await eventually(lambda: relay.newest() == Version(1, 1))
    path = relay.directory / "v1.1" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    engine = Engine("replica")
    limits = SourceLimits(look_s=0.2, fallback_s=0.3, retry_s=0.1, ban_s=60)
    options = {**EAGER, "sources": limits, "local_files": False}
    async with engine.receiving(root.target, tmp_path / "shm", **options):
        await eventually(lambda: engine.version == Version(1, 1))
        assert (await watchers(root), await watchers(relay)) == (2, 0)
    assert equal_bits(engine.tensors, weights(1))
