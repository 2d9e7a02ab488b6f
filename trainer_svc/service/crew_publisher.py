"""Rank 0's publisher: the other ranks push their parts whenever it pushes its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

import grpc
import torch.distributed as dist

from trainer_svc.service.crew import Crew
from weightsync.publisher import PushReport, Update, WeightPublisher

__all__ = ["CrewPublisher"]


class CrewPublisher(WeightPublisher):
    """Publishes versions of one run from all ranks.

    Args:
        crew: The ranks.
        channel: To the weight service.
        run: The run's name.
        encoding: As for `WeightPublisher`.
        local: As for `WeightPublisher`.
        group: The group in which the ranks' publishers agree; None: this process is alone.
    """

    def __init__(
        self,
        crew: Crew,
        channel: grpc.aio.Channel,
        run: str,
        *,
        encoding: Literal["auto", "dense"] = "auto",
        local: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(channel, run, encoding=encoding, local=local, group=group)
        self._crew = crew
        self._pushing: asyncio.Task[PushReport] | None = None

    async def publish(
        self, update: Update, *, deadline_s: float, labels: Mapping[str, str] | None = None
    ) -> PushReport:
        """See `WeightPublisher.publish`. With several ranks a push goes on to its end though its caller leaves: the others do so."""
        if not self._crew.several:
            return await super().publish(update, deadline_s=deadline_s, labels=labels)
        self._crew.publish(version=str(update.version), deadline_s=deadline_s)
        pushing = asyncio.create_task(super().publish(update, deadline_s=deadline_s, labels=labels))
        pushing.add_done_callback(_heard)
        self._pushing = pushing
        return await asyncio.shield(pushing)

    async def settle(self, timeout_s: float) -> bool:
        """Wait for a push whose caller has left.

        Returns:
            Whether none is under way any more.
        """
        if self._pushing is None or self._pushing.done():
            return True
        await asyncio.wait({self._pushing}, timeout=timeout_s)
        return self._pushing.done()


def _heard(pushing: asyncio.Task[PushReport]) -> None:
    """Whoever waits hears of a failure; if nobody does any more, there is nothing to be done about it."""
    if not pushing.cancelled():
        pushing.exception()
