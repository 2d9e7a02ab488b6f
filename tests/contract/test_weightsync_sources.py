"""Engines find the nearest source, and the root again when it fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from relay_stack import Engine, Node, push, running
from simulated_clock import SimulatedClock
from weightsync_stack import RESOURCE, equal_bits, eventually, weights

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.versions import Version
from weightsync.receive.sources import SourceLimits
from weightsync.receiver import PolicyMode, WeightReceiver

pytestmark = pytest.mark.slow

LEASE = {"lease_s": 1e6}
"""Leases, and stalled relays unless a test says otherwise, do not end however far a test moves the clock."""

LIMITS = SourceLimits(look_s=1.0, answer_s=60.0, fallback_s=3.0, retry_s=0.5, ban_s=1.0, stall_s=1e6)
LONGEST_PAUSE_S = 1.5
"""Simulated seconds in which each engine looks for a nearer source, and tries again a version that it could not take."""


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest_asyncio.fixture
async def root(clock: SimulatedClock, tmp_path: Path) -> AsyncIterator[Node]:
    async with running(Node(tmp_path / "root", clock=clock, **LEASE)) as node:
        yield node


@pytest_asyncio.fixture
async def relay(root: Node, clock: SimulatedClock, tmp_path: Path) -> AsyncIterator[Node]:
    async with running(Node(tmp_path / "relay", upstream=root.target, clock=clock, **LEASE)) as node:
        await listed(root, node)
        yield node


def receiving(
    engine: Engine, root: Node, tmp_path: Path, limits: SourceLimits = LIMITS, **options: object
) -> AbstractAsyncContextManager[WeightReceiver]:
    """Let an engine follow the nearest source, on the clock of the root."""
    connect_to = partial(connect, security=SecurityConfig())
    return engine.receiving(
        root.target, tmp_path / "shm", clock=root.clock, connect_to=connect_to, sources=limits, **options
    )


async def listed(root: Node, *relays: Node) -> None:
    """Wait until the root knows its relays."""
    run = await root.serving.runs.open(RESOURCE)
    addresses = {relay.target for relay in relays}
    await eventually(lambda: addresses <= {each.address for each in run.describe_relays(root.clock())})


async def test_an_engine_takes_versions_from_the_relay(root: Node, relay: Node, tmp_path: Path) -> None:
    engine = Engine("replica")
    async with receiving(engine, root, tmp_path):
        await push(root, Version(1, 1), weights(1))
        await eventually(lambda: engine.version == Version(1, 1))
        own, relayed = [await node.serving.runs.open(RESOURCE) for node in (root, relay)]
        await eventually(lambda: (own.watchers, relayed.watchers) == (1, 1))
    assert equal_bits(engine.tensors, weights(1))


async def test_an_engine_goes_to_a_relay_that_comes_later(root: Node, clock: SimulatedClock, tmp_path: Path) -> None:
    engine = Engine("replica")
    async with receiving(engine, root, tmp_path):
        await push(root, Version(1, 1), weights(1))
        await eventually(lambda: engine.version == Version(1, 1))
        async with running(Node(tmp_path / "late", upstream=root.target, clock=clock, **LEASE)) as late:
            await listed(root, late)
            await eventually(lambda: late.newest() == Version(1, 1))
            run = await late.serving.runs.open(RESOURCE)
            assert run.watchers == 0
            await clock.advance(LONGEST_PAUSE_S)
            await eventually(lambda: run.watchers == 1)
            await push(root, Version(1, 2), weights(2))
            await eventually(lambda: engine.version == Version(1, 2))


async def test_engines_fall_back_to_the_root_and_return(
    root: Node, relay: Node, clock: SimulatedClock, tmp_path: Path
) -> None:
    engines = [Engine(f"replica-{index}") for index in range(3)]
    own = await root.serving.runs.open(RESOURCE)
    relayed = await relay.serving.runs.open(RESOURCE)
    async with (
        receiving(engines[0], root, tmp_path),
        receiving(engines[1], root, tmp_path),
        receiving(engines[2], root, tmp_path),
    ):
        await push(root, Version(1, 1), weights(1))
        await eventually(lambda: all(engine.version == Version(1, 1) for engine in engines))
        await eventually(lambda: (own.watchers, relayed.watchers) == (1, 3))
        await relay.stop()
        await push(root, Version(1, 2), weights(2))
        await clock.until(lambda: all(engine.version == Version(1, 2) for engine in engines), step_s=LIMITS.retry_s)
        await eventually(lambda: own.watchers == 3)
        await relay.start()
        await clock.until(lambda: own.watchers == 1, step_s=LIMITS.retry_s)
        await push(root, Version(1, 3), weights(3))
        await eventually(lambda: all(engine.version == Version(1, 3) for engine in engines))
    assert all(equal_bits(engine.tensors, weights(3)) for engine in engines)


async def test_a_version_that_only_the_root_holds_is_had_from_there(root: Node, relay: Node, tmp_path: Path) -> None:
    await push(root, Version(1, 1), weights(1))
    await push(root, Version(1, 2), weights(2))
    await eventually(lambda: relay.newest() == Version(1, 2))
    run = await relay.serving.runs.open(RESOURCE)
    engine = Engine("replica")
    async with receiving(engine, root, tmp_path) as receiver:
        await eventually(lambda: engine.version == Version(1, 2))
        if Version(1, 1) in run.versions:
            await relay.serving.runs.delete(run, Version(1, 1))
        receiver.set_policy(PolicyMode.TARGET, Version(1, 1), owner="test", ttl_s=3600)
        await eventually(lambda: engine.version == Version(1, 1))


async def test_a_relay_that_gets_nothing_new_is_left(
    root: Node, relay: Node, clock: SimulatedClock, tmp_path: Path
) -> None:
    engine = Engine("replica")
    async with receiving(engine, root, tmp_path, replace(LIMITS, stall_s=30.0)):
        await push(root, Version(1, 1), weights(1))
        await eventually(lambda: engine.version == Version(1, 1))
        run = await relay.serving.runs.open(RESOURCE)
        async with run.commit_lock:  # the relay answers, and commits nothing
            await push(root, Version(1, 2), weights(2))
            await clock.until(lambda: engine.version == Version(1, 2), step_s=LIMITS.look_s)


async def test_a_relay_that_gives_damaged_bytes_is_left(
    root: Node, relay: Node, clock: SimulatedClock, tmp_path: Path
) -> None:
    await push(root, Version(1, 1), weights(1))
    await eventually(lambda: relay.newest() == Version(1, 1))
    path = relay.directory / "v1.1" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    engine = Engine("replica")
    async with receiving(engine, root, tmp_path, replace(LIMITS, ban_s=60.0), local_files=False) as receiver:
        await eventually(lambda: bool(receiver.status().last_error))
        await clock.advance(LONGEST_PAUSE_S)
        await eventually(lambda: engine.version == Version(1, 1))
        own, relayed = [await node.serving.runs.open(RESOURCE) for node in (root, relay)]
        await eventually(lambda: (own.watchers, relayed.watchers) == (2, 0))
    assert equal_bits(engine.tensors, weights(1))
