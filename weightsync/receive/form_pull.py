"""Pulls all shards of one form of a version into their sinks, from sockets or from files of this host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from sluice import tasks
from sluice.v1 import weightsync_pb2 as pb
from weightsync.receive.local_files import is_local, read_local
from weightsync.receive.pull import ChunkSink, PullCall, PullLimits, ShardRange, pull_range
from weightsync.receive.route import Step

__all__ = ["BuildCost", "FormPull", "run_to_end"]

T = TypeVar("T")

_LOCAL_BYTES = 64 << 20
"""Read from a file of this host at a time; a pull that is no longer wanted ends after so many."""


@dataclass(slots=True)
class BuildCost:
    """What it took to make a file.

    Attributes:
        pulled_bytes: Bytes that came by sockets.
        local_bytes: Bytes that were read from files of this host.
        last_byte_at: `time.perf_counter` when the last byte had come.
    """

    pulled_bytes: int = 0
    local_bytes: int = 0
    last_byte_at: float = field(default_factory=time.perf_counter)


class FormPull:
    """Pulls from one service.

    Args:
        call: The service.
        threads: Where sinks work.
        limits: How long to wait, and how many shards to pull at a time.
    """

    def __init__(self, call: PullCall, threads: Executor, limits: PullLimits) -> None:
        self.threads = threads
        self._call = call
        self._limits = limits

    async def pull(self, step: Step, sinks: Mapping[str, ChunkSink], cost: BuildCost, *, local: bool) -> None:
        """Fill the sinks of all shards, several at a time.

        Args:
            step: The form.
            sinks: By shard name.
            cost: Grows by what came, also where the pull fails.
            local: Read files of this host where they are named.

        Raises:
            PullError, StagingError, OSError: as `pull_range` and `read_local`.
        """
        slots = asyncio.Semaphore(self._limits.streams)

        async def pull(shard: pb.Shard) -> None:
            async with slots:
                await self._pull_shard(step, shard, sinks[shard.name], cost, local=local)

        tasks = [asyncio.create_task(pull(shard)) for shard in step.manifest.shards]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            cost.last_byte_at = time.perf_counter()

    async def _pull_shard(self, step: Step, shard: pb.Shard, sink: ChunkSink, cost: BuildCost, *, local: bool) -> None:
        file, before, end = step.files.get(shard.name), sink.position, shard.size_bytes
        if local and file is not None and is_local(file):
            while sink.position < end:
                until = min(end, sink.position + _LOCAL_BYTES)
                await run_to_end(self.threads, partial(read_local, file, shard.size_bytes, sink, until))
            cost.local_bytes += sink.position - before
            return
        wanted = ShardRange(
            run=step.manifest.run,
            version=step.manifest.version,
            shard=shard.name,
            end=end,
            base=step.manifest.base if step.is_delta else None,
        )
        try:
            await pull_range(self._call, wanted, sink, self.threads, self._limits)
        finally:
            cost.pulled_bytes += sink.position - before


async def run_to_end(threads: Executor, work: Callable[[], T]) -> T:
    """Run in a thread. A caller that is cancelled still waits for the thread: it may work on a file that is about to go."""
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    return await tasks.run_to_end(future)
