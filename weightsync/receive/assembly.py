"""One attempt to make a version's file: base copy and deltas, or dense form and deltas, pulled and applied side by side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sluice.versions import Version
from weightsync.receive.delta_shard import DeltaShard
from weightsync.receive.form_pull import BuildCost, FormPull, run_to_end
from weightsync.receive.patching import Digests, PatchedFile, slice_digests
from weightsync.receive.route import Step
from weightsync.receive.staged_file import copy_file
from weightsync.receive.staging import StagingError, StagingFile

__all__ = ["Assembly", "HeldVersion"]


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A whole version that a delta can be applied to.

    Attributes:
        version: Which one.
        path: Its file; nobody changes it.
        digests: Of its slices, verified.
    """

    version: Version
    path: Path
    digests: Digests


class Assembly:
    """Fills one file.

    Args:
        pull: Where the forms come from.
        descriptor: The file, open to read and write; emptied at the beginning.
        cost: Grows by what it took.
        local: Read files of this host where they are named.
    """

    def __init__(
        self,
        pull: FormPull,
        descriptor: int,
        cost: BuildCost,
        *,
        local: bool,
    ) -> None:
        self._pull = pull
        self._descriptor = descriptor
        self._cost = cost
        self._local = local

    async def follow(self, steps: Sequence[Step], held: HeldVersion | None) -> None:
        """Apply forms one after the other; the file is whole and verified when this returns.

        Args:
            steps: A route that passed `check_route`.
            held: What the first is based on; None where it is a dense form.

        Raises:
            PullError, StagingError, OSError: if that fails; the file is of no use then.
        """
        if held is None:
            await self._take_dense(steps[0])
            if steps[1:]:
                digests = slice_digests(steps[0].manifest)
                await self._patch(steps[1:], digests, steps[0].manifest.size_bytes)
            return
        limit = held.path.stat().st_size
        async with self._copying(held.path) as copied:
            await self._patch(steps, held.digests, limit, copied)

    async def _take_dense(self, step: Step) -> None:
        staging = StagingFile(step.manifest, self._descriptor)
        sinks = {shard.name: staging.sink(shard.name) for shard in step.manifest.shards}
        await self._pull.pull(step, sinks, self._cost, local=self._local)
        await run_to_end(self._pull.threads, staging.finish)

    @contextlib.asynccontextmanager
    async def _copying(self, source: Path) -> AsyncIterator[asyncio.Future[None]]:
        """Copies a file while the block runs, and ends the copy where the block is left early."""
        stop = threading.Event()
        os.ftruncate(self._descriptor, 0)
        work = partial(copy_file, source, self._descriptor, stop)
        copied = asyncio.get_running_loop().run_in_executor(self._pull.threads, work)
        try:
            yield copied
        finally:
            stop.set()
            await asyncio.gather(copied, return_exceptions=True)

    async def _patch(
        self, deltas: Sequence[Step], digests: Digests, limit: int, copied: asyncio.Future[None] | None = None
    ) -> None:
        """Apply a chain; the next delta comes in while one is applied, so that two are in memory at most.

        Args:
            deltas: At least one.
            digests: What the file's content is known to have.
            limit: Bytes that a delta may have.
            copied: Done when the file has that content; None if it has.
        """
        pulling = asyncio.create_task(self._pull_delta(deltas[0], limit))
        patched: PatchedFile | None = None
        try:
            for index, step in enumerate(deltas):
                shards = await pulling
                following = deltas[index + 1 : index + 2]
                if following:
                    pulling = asyncio.create_task(self._pull_delta(following[0], limit))
                if patched is None:
                    if copied is not None:
                        await asyncio.shield(copied)
                    patched = await run_to_end(self._pull.threads, partial(PatchedFile, self._descriptor, digests))
                apply = partial(patched.apply, step.manifest, shards, verify=not following)
                await run_to_end(self._pull.threads, apply)
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
            if patched is not None:
                patched.close()

    async def _pull_delta(self, step: Step, limit: int) -> list[DeltaShard]:
        shards = step.manifest.shards
        size = sum(shard.size_bytes for shard in shards)
        if size > limit:
            version = Version.from_proto(step.manifest.version)
            raise StagingError(f"the delta to {version} has {size} bytes, its base {limit}: a dense form is smaller")
        sinks = {shard.name: DeltaShard(shard) for shard in shards}
        await self._pull.pull(step, sinks, self._cost, local=self._local)
        for sink in sinks.values():
            await run_to_end(self._pull.threads, sink.finish)
        return list(sinks.values())
