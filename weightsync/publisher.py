"""The trainer's half: pushes versions and commits them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Literal

import grpc
import structlog
import torch
import torch.distributed as dist

from sluice.rpc import SluiceError
from sluice.versions import Version
from weightsync.format.chunks import MAX_CHUNK_BYTES
from weightsync.format.names import run_resource
from weightsync.publish.adapter_publisher import AdapterPublisher
from weightsync.publish.baseline import Baseline, Diff
from weightsync.publish.delta_trials import DeltaTrials
from weightsync.publish.dense_push import push_dense
from weightsync.publish.group_commit import Frame, Ranks
from weightsync.publish.kept_file import HOST_DIRECTORY
from weightsync.publish.push_report import PushReport
from weightsync.publish.rank_plan import PLAN, agree_on_shares
from weightsync.publish.shard_source import ShardSource
from weightsync.publish.slices import LocalSlice, local_slices
from weightsync.publish.transfer import Destination
from weightsync.publish.version_push import Update, VersionPush

__all__ = ["AdapterPublisher", "PushReport", "Update", "WeightPublisher"]

SHARD = "model"
"""Name of the only shard of a version that one process pushes."""

_AGREE_S = 600.0
"""Longest wait for the other ranks where `encode` is told no deadline."""

log = structlog.get_logger(__name__)


class WeightPublisher:
    """Publishes versions of one run.

    Two ways lead to a version. `push` sends whole tensors and keeps nothing. `encode` and `publish` keep one copy of what
    was pushed last and send the difference from it, exact to the bit, where that has at most half the bytes:

        update = publisher.encode(version, tensors)      # in the thread that owns the weights; they must not change
        report = await publisher.publish(update, ...)    # in the background; the weights may change

    The copy is the only one: 1x the shard's size, for as long as the publisher lives. It may be written only while nothing
    reads it. `publish` therefore holds it until the version is committed or given up, `encode` waits for that within its
    deadline, and an update that was overtaken by a later `encode` is refused rather than sent.

    Whether the copy is what the service has is known after a commit that was answered, and at no other time: after any
    failure, at the first version of an epoch and after a restart, whole tensors go out (an anchor).

    With a `group`, each rank has a publisher over its own channel and calls the same methods in the same order with the
    tensors that it holds: DTensors of FSDP2 or tensor parallelism, or plain ones. What several ranks hold is sent by one of
    them. A failure of any rank is one of all.

    Args:
        channel: To the weight service, with the admin role.
        run: The run's name.
        chunk_bytes: Bytes per chunk, at most 1 MiB.
        encoding: "auto" compares with the version before; "dense" always sends whole tensors.
        local: Whether to offer the service files in shared memory where it runs on the same host.
        group: Ranks that publish one model together: a gloo group that nothing else uses; None: this process is alone.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        run: str,
        *,
        chunk_bytes: int = MAX_CHUNK_BYTES,
        encoding: Literal["auto", "dense"] = "auto",
        local: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; the contract allows 1 to {MAX_CHUNK_BYTES}")
        self._channel = channel
        self._run = run_resource(run)
        self._chunk_bytes = chunk_bytes
        self._encoding = encoding
        self._directory = HOST_DIRECTORY if local and HOST_DIRECTORY.is_dir() else None
        self._ranks = Ranks(group)
        self._shard = SHARD if group is None else f"rank-{self._ranks.rank:05d}"
        self._trials = DeltaTrials()
        self._in_use = threading.Lock()
        """Held by whoever writes or reads the kept copy."""
        self._baseline: Baseline | None = None
        self._dense_bytes = 0
        self._layout: list[LocalSlice] = []
        self._committed: Version | None = None
        """Version that the kept copy holds, if its commit was answered."""
        self._serial = 0

    async def push(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        *,
        deadline_s: float,
        labels: Mapping[str, str] | None = None,
    ) -> PushReport:
        """Publish whole tensors: visible as a whole when this returns, not at all if it raises before the commit.

        Idempotent: the same version with the same content is found and nothing is sent. A failure on the way is repeated
        once, from the last byte that the service holds.

        Args:
            version: Which one.
            tensors: CPU tensors by Hugging Face name, in the data type to publish; unchanged until this returns.
            deadline_s: Seconds for everything.
            labels: Free facts for the manifest.

        Raises:
            SluiceError: as the contract says of PushWeights and CommitVersion; DEADLINE_EXCEEDED leaves the version before
                serving.
            ValueError: if a tensor cannot travel.
        """
        to = self._destination(version, deadline_s)
        return await push_dense(to, ShardSource(SHARD, tensors), chunk_bytes=self._chunk_bytes, labels=labels or {})

    def encode(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        deadline_s: float = _AGREE_S,
    ) -> Update:
        """Compare live tensors with what was pushed last, and keep them in its place. Blocking; not for the event loop.

        Args:
            version: Which one.
            tensors: Live tensors by Hugging Face name, on any device; unchanged until this returns. Tied ones travel once.
            dtype: Precision to publish floating-point tensors in, cast one by one; None: as they are.
            deadline_s: Seconds to wait for the push before, and at the first call for the other ranks.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if the push before goes on for longer; of several ranks, what any failed with.
            ValueError: if a tensor cannot travel.
        """
        deadline = time.monotonic() + deadline_s
        if not self._in_use.acquire(timeout=max(0.0, deadline_s)):
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "PUSH_IN_PROGRESS",
                f"the version before {version} is still being pushed: wait for its publish to end, or allow more than {deadline_s:g} s",
            )
        try:
            self._serial += 1
            base, self._committed = self._base_of(version), None
            layout = self._layout
            baseline, live = self._prepare(version, tensors, dtype, deadline)
            if self._layout is not layout:
                base = None  # another model: the copy holds nothing yet
            diff = self._renew(version, baseline, live, deadline, compare=base is not None)
        finally:
            self._in_use.release()
        return Update(version, base, diff, self._serial)

    async def publish(
        self, update: Update, *, deadline_s: float, labels: Mapping[str, str] | None = None
    ) -> PushReport:
        """Push and commit what `encode` kept: visible as a whole when this returns.

        Idempotent while the copy holds the version. A transfer that broke is repeated once from where it broke; a base that
        the service does not have any more is answered by whole tensors of the same version, at once.

        Args:
            update: What `encode` gave last.
            deadline_s: Seconds for everything.
            labels: Free facts for the manifest.

        Raises:
            SluiceError: as the contract says of PushWeights and CommitVersion; FAILED_PRECONDITION OVERTAKEN if a later
                `encode` took the copy, RANK_LOST if a rank is gone; of several ranks, what any failed with.
        """
        if not self._in_use.acquire(blocking=False):
            raise _overtaken(update.version)
        try:
            if self._baseline is None or update.serial != self._serial:
                raise _overtaken(update.version)
            self._committed = None
            push = VersionPush(
                self._destination(update.version, deadline_s),
                self._ranks,
                self._baseline,
                update,
                chunk_bytes=self._chunk_bytes,
                directory=self._directory,
                labels=labels or {},
            )
            agreement = await push.agree()
            if agreement.compared:
                self._trials.note(worth=agreement.kind == "delta")
            report = await push.run()
            if not push.sees_files:
                self._directory = None  # the service is on another host, or does not take files
            self._committed = update.version
            return report
        finally:
            self._in_use.release()

    async def update(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        deadline_s: float,
        labels: Mapping[str, str] | None = None,
    ) -> PushReport:
        """`encode` in a thread, then `publish`; the tensors must not change until this returns.

        Raises:
            SluiceError, ValueError: as both.
        """
        deadline = time.monotonic() + deadline_s
        encoded = await asyncio.to_thread(self.encode, version, tensors, dtype=dtype, deadline_s=deadline_s)
        return await self.publish(encoded, deadline_s=deadline - time.monotonic(), labels=labels)

    async def close(self) -> None:
        """Give the kept copy back; `publish` must have ended. The next version after it is an anchor."""
        baseline, self._baseline, self._committed = self._baseline, None, None
        if baseline is not None:
            await asyncio.to_thread(baseline.close)

    def _base_of(self, version: Version) -> Version | None:
        """The version to compare with, None where whole tensors go out."""
        base = self._committed
        if self._encoding == "dense" or base is None or base.epoch != version.epoch or base >= version:
            return None
        return base if self._trials.due() else None

    def _prepare(
        self, version: Version, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, deadline: float
    ) -> tuple[Baseline, list[torch.Tensor]]:
        """The kept copy, made at the first call and where the model became another one, and what it is made from."""
        try:
            held = local_slices(tensors, dtype)
        except ValueError as error:
            self._tell_failure(version, error, deadline)
            raise
        layout = [row for row, _ in held]
        if self._baseline is None or layout != self._layout:
            if self._baseline is not None and self._ranks.count > 1:
                changed = ValueError("the layout of the model's slices changed: make a new publisher on every rank")
                self._tell_failure(version, changed, deadline)
                raise changed
            self._baseline = None  # gives its memory back before the next one takes as much
            mine, self._dense_bytes = agree_on_shares(self._ranks, layout, deadline)
            self._baseline = Baseline(self._shard, mine, self._directory)
            self._layout = layout
        live = {row.key: tensor for row, tensor in held}
        return self._baseline, [live[row.key] for row in self._baseline.rows]

    def _renew(
        self, version: Version, baseline: Baseline, live: list[torch.Tensor], deadline: float, *, compare: bool
    ) -> Diff:
        try:
            return baseline.renew(live, compare=compare, most_bytes=self._dense_bytes // 2)
        except Exception as error:
            self._tell_failure(version, error, deadline)
            raise

    def _tell_failure(self, version: Version, error: Exception, deadline: float) -> None:
        """Let the other ranks end at once, which wait for this one's layout or offer."""
        step = PLAN if self._baseline is None else f"offer {version}"
        told = SluiceError(grpc.StatusCode.INTERNAL, "ENCODE_FAILED", f"{type(error).__name__}: {error}")
        try:
            self._ranks.exchange(step, Frame(failure=told), deadline)
        except SluiceError as lost:
            log.warning("the other ranks could not be told of a failure", error=str(lost))

    def _destination(self, version: Version, deadline_s: float) -> Destination:
        return Destination(self._channel, self._run, version, time.monotonic() + deadline_s)


def _overtaken(version: Version) -> SluiceError:
    return SluiceError.failed_precondition(
        "OVERTAKEN", f"version {version} is no longer kept or is being published: publish what encode gave last, once"
    )
