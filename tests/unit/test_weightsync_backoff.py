"""Pauses between attempts: one rule for whoever waits for a weight service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weightsync_stack import RESOURCE, running_stack

from sluice.backoff import Backoff
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync import relay
from weightsync.receive import pull
from weightsync.receive.pull import PullError, PullLimits, pull_shard
from weightsync.relay import FetchError, fetch_version


@given(first_s=st.floats(0.001, 5), failures=st.integers(1, 5000))
def test_pauses_grow_to_their_bound_and_no_further(first_s: float, failures: int) -> None:
    backoff = Backoff(first_s)
    pauses = [backoff.fail() for _ in range(failures)]
    assert all(0 < pause <= backoff.longest_s for pause in pauses)
    assert pauses[0] <= 1.5 * first_s
    assert backoff.at_longest or failures < 14
    backoff.succeed()
    assert backoff.fail() <= 1.5 * first_s


class Nowhere:
    """A sink that is never filled."""

    position = 0

    def feed(self, offset: int, data: memoryview) -> None:
        raise AssertionError(offset)


class Unreachable:
    """PullWeights of a service that is away."""

    def __call__(self, request: pb.PullWeightsRequest, timeout: float) -> Unreachable:
        return self

    async def read(self) -> bytes:
        empty = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield await self.read()

    def cancel(self) -> None:
        pass

    def PullWeights(self, request: pb.PullWeightsRequest, timeout: float) -> Unreachable:  # noqa: N802 - gRPC's name
        return self


async def test_a_relay_waits_for_its_upstream_no_longer_than_an_engine_for_its_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    limits = PullLimits(attempts=12)
    async with running_stack(tmp_path) as stack:
        run = await stack.runs.open(RESOURCE)

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)

        # Only theirs: a server that looks at its readiness each second would never let go of the loop.
        for module in (pull, relay):
            monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        unreachable: Any = Unreachable()
        manifest = pb.Manifest(run=RESOURCE, version=Version(1, 1).to_proto(), kind=pb.VERSION_KIND_ANCHOR)
        shard = manifest.shards.add(name="model", size_bytes=100)
        with pytest.raises(PullError):
            await pull_shard(unreachable, manifest, shard, Nowhere(), threads=stack.runs.threads, limits=limits)
        engine, pauses = pauses, []
        upstream = partial(pull_shard, unreachable, threads=stack.runs.threads, limits=limits)
        with pytest.raises(FetchError):
            await fetch_version(stack.runs, run, manifest, upstream)
        monkeypatch.undo()
    assert len(pauses) == len(engine) == limits.attempts - 1
    assert max(pauses) <= 5
    assert max(engine) <= 5
