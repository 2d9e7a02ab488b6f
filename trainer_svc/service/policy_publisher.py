"""What a policy publishes: its weights, or the adapter beside a base that the replicas have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import torch

from sluice.versions import Version
from trainer_svc.engine.engine import TrainEngine
from weightsync.publisher import AdapterPublisher, PushReport, WeightPublisher

__all__ = ["Offer", "PolicyPublisher"]


@dataclass(frozen=True, slots=True)
class Offer:
    """A version that is ready to be published; later steps do not change it.

    Attributes:
        version: Which one.
        push: Publishes it, given `deadline_s`; may be called again after a failure.
    """

    version: Version
    push: Callable[..., Awaitable[PushReport]]


@dataclass(frozen=True, slots=True)
class PolicyPublisher:
    """Publishes the versions of one policy.

    Attributes:
        weights: Publishes weights.
        adapters: Publishes adapters of the model that the run starts from, which every replica loads from disk; None on
            ranks that only take part in collecting one.
    """

    weights: WeightPublisher
    adapters: AdapterPublisher | None = None

    def keep(self, engine: TrainEngine, version: Version, *, dtype: torch.dtype | None, deadline_s: float) -> Offer:
        """Take what is to be published out of the engine. Blocking; of several ranks, all call it.

        Args:
            engine: The policy.
            version: Which one it is now.
            dtype: Precision of what is published; None keeps float32.
            deadline_s: Seconds to wait for the push before.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if the push before goes on for longer.
        """
        adapter = engine.adapter
        if adapter is None or adapter.config.merges:
            update = self.weights.encode(version, engine.live_tensors(), dtype=dtype, deadline_s=deadline_s)
            return Offer(version, partial(self.weights.publish, update))
        tensors = adapter.tensors(dtype)
        if self.adapters is None:
            return Offer(version, _nothing)
        return Offer(version, partial(self.adapters.push, version, tensors, adapter.settings))


async def _nothing(*, deadline_s: float) -> PushReport:
    raise RuntimeError(f"this rank has nothing to publish, not within {deadline_s:g} s either")
