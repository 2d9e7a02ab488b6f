"""From the policy to weight sync: encode a version, its weights or its adapter, and push versions in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic

import grpc
import structlog
import torch

from sluice.rpc import SluiceError
from sluice.tasks import discard_outcome
from sluice.versions import Version
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.service.rank_group import Publish, RankGroup
from weightsync.publisher import AdapterPublisher, PushReport, Update, WeightPublisher

RETRIED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Failures of a push that another attempt may cure. A refused version stays refused."""

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
"""Pauses between attempts double from the first to the longest."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """A version that is ready to be published. Later steps do not change it.

    Attributes:
        push: Publishes it, given `deadline_s`; may be called again after a failure.
    """

    version: Version
    push: Callable[..., Awaitable[PushReport]]


class PolicyPublisher:
    """Encode and push the versions of one policy: its weights, or its adapter if the replicas have the base.

    Args:
        weights: Publishes weights.
        adapters: Publishes adapters of the model that the run starts from, which every replica loads from disk; None on
            ranks that only help to collect one.
        ranks: The ranks that push together; None: this process is alone, or another one leads.
    """

    def __init__(
        self, weights: WeightPublisher, adapters: AdapterPublisher | None = None, ranks: RankGroup | None = None
    ) -> None:
        self._weights, self._adapters, self._ranks = weights, adapters, ranks
        self._pushing: asyncio.Task[PushReport] | None = None

    def encode(self, engine: TrainEngine, version: Version, *, dtype: torch.dtype | None, deadline_s: float) -> Offer:
        """Encode a version of the engine. Blocks; every rank calls it.

        Args:
            engine: The policy.
            version: The version of its weights.
            dtype: Precision of the published tensors; None keeps float32.
            deadline_s: Seconds to wait for the push of the version before; SluiceError DEADLINE_EXCEEDED afterwards.
        """
        adapter = engine.adapter
        if adapter is None or adapter.config.merges:
            update = self._weights.encode(version, engine.live_tensors(), dtype=dtype, deadline_s=deadline_s)
            return Offer(version, partial(self._push_weights, update))
        tensors = adapter.tensors(dtype)
        if self._adapters is None:
            return Offer(version, _nothing)
        return Offer(version, partial(self._adapters.push, version, tensors, adapter.settings))

    async def _push_weights(self, update: Update, *, deadline_s: float) -> PushReport:
        """Push weights on every rank.

        With several ranks a push runs to its end even if its caller is cancelled, because the other ranks do not stop.
        """
        if self._ranks is None:
            return await self._weights.publish(update, deadline_s=deadline_s)
        self._ranks.publish(Publish(update.version, deadline_s))
        self._pushing = asyncio.create_task(self._weights.publish(update, deadline_s=deadline_s))
        discard_outcome(self._pushing)
        return await asyncio.shield(self._pushing)

    async def close(self, grace_s: float) -> None:
        """Release the kept copy, unless a push whose caller was cancelled still reads it after `grace_s` seconds."""
        if self._pushing is not None and not self._pushing.done():
            await asyncio.wait({self._pushing}, timeout=grace_s)
            if not self._pushing.done():
                return
        await self._weights.close()


async def _nothing(*, deadline_s: float) -> PushReport:
    raise RuntimeError(f"this rank has nothing to publish (deadline {deadline_s:g} s); this is a defect")


class Publication:
    """Publish the versions of one epoch in order, one at a time: the publisher's copy of the weights holds one.

    Args:
        deadline_s: Seconds for one version, retries included.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.published: Version | None = None
        self.last_push: PushReport | None = None

    async def publish(self, offered: Offer) -> None:
        """Push one version; retry until the deadline.

        Raises:
            SluiceError: the failure of the last attempt.
        """
        deadline = monotonic() + self._deadline_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                self.last_push = await offered.push(deadline_s=deadline - monotonic())
            except SluiceError as error:
                if error.code not in RETRIED or monotonic() + pause_s >= deadline:
                    raise SluiceError(
                        error.code,
                        error.reason,
                        f"version {offered.version} could not be published within {self._deadline_s:g} s:"
                        f" {error.message} (is weightsync up at peers.weightsync?)",
                        retry_after_s=error.retry_after_s,
                    ) from error
                log.warning("push failed, retrying", version=str(offered.version), error=str(error), pause_s=pause_s)
            else:
                self.published = offered.version
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
