"""Rank 0's publisher: the other ranks push their parts whenever it pushes its own."""

from __future__ import annotations

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

    async def publish(
        self, update: Update, *, deadline_s: float, labels: Mapping[str, str] | None = None
    ) -> PushReport:
        """See `WeightPublisher.publish`."""
        self._crew.publish(version=str(update.version), deadline_s=deadline_s)
        return await super().publish(update, deadline_s=deadline_s, labels=labels)
