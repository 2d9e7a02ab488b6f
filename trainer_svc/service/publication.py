"""From the policy to weight sync: encode a version, its weights or its adapter, and push it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from sluice.rpc import SluiceError
from sluice.tasks import discard_outcome
from sluice.versions import Version
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.service.rank_group import Publish, RankGroup
from weightsync.publisher import AdapterPublisher, PushReport, Update, WeightPublisher


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """An adapter that is ready to be published, with its settings as PEFT writes them. Later steps do not change it."""

    version: Version
    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, object]


Offer: TypeAlias = Update | AdapterUpdate
"""A version that is ready to be published."""


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
            return self._weights.encode(version, engine.live_tensors(), dtype=dtype, deadline_s=deadline_s)
        return AdapterUpdate(version, adapter.tensors(dtype), adapter.settings)

    async def publish(self, offer: Offer, *, deadline_s: float) -> PushReport:
        """Push a version, which serves when this returns. Rank 0 pushes adapters; weights are pushed by all ranks together.

        With several ranks a push of weights runs on if its caller is cancelled, because the other ranks do not stop; it is then
        given up at its next attempt.

        Raises:
            SluiceError: what the push failed with at last.
        """
        try:
            if isinstance(offer, AdapterUpdate):
                return await self._push_adapter(offer, deadline_s)
            if self._ranks is None:
                return await self._weights.publish(offer, deadline_s=deadline_s)
            return await self._push_on_all_ranks(self._ranks, offer, deadline_s)
        except SluiceError as error:
            raise SluiceError(
                error.code,
                error.reason,
                f"version {offer.version} could not be published within {deadline_s:g} s:"
                f" {error.message} (is weightsync up at peers.weightsync?)",
                retry_after_s=error.retry_after_s,
            ) from error

    async def _push_adapter(self, offer: AdapterUpdate, deadline_s: float) -> PushReport:
        if self._adapters is None:
            raise RuntimeError(f"this rank does not publish adapters, but was given {offer.version}; this is a defect")
        return await self._adapters.push(offer.version, offer.tensors, offer.settings, deadline_s=deadline_s)

    async def _push_on_all_ranks(self, ranks: RankGroup, update: Update, deadline_s: float) -> PushReport:
        ranks.publish(Publish(update.version, deadline_s))
        self._pushing = asyncio.create_task(self._weights.publish(update, deadline_s=deadline_s))
        discard_outcome(self._pushing)
        try:
            return await asyncio.shield(self._pushing)
        except asyncio.CancelledError:
            self._weights.give_up()
            raise

    async def close(self, grace_s: float) -> None:
        """Release the kept copy, unless a push whose caller was cancelled still reads it after `grace_s` seconds."""
        if self._pushing is not None and not self._pushing.done():
            await asyncio.wait({self._pushing}, timeout=grace_s)
            if not self._pushing.done():
                return
        await self._weights.close()
