"""Every rank but the first: does what rank 0 says, in the order in which it says it, until rank 0 lets it go or is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from sluice.rpc import SluiceError
from sluice.versions import Version
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.crew_link import Command, CrewLink
from trainer_svc.service.learner import Learner
from trainer_svc.service.policy_publisher import Offer, PolicyPublisher

__all__ = ["RankWorker"]

log = structlog.get_logger(__name__)

FOR_GOOD_S = 366 * 86400.0
"""Seconds that a rank may serve: the commands inside have deadlines of their own, their sum has none."""


class RankWorker:
    """Carries out commands: those that compute in the compute thread, publications beside them.

    Args:
        learner: This rank's part of the policy.
        link: To rank 0.
        publisher: Pushes this rank's part of a version.
    """

    def __init__(self, learner: Learner, link: CrewLink, publisher: PolicyPublisher) -> None:
        self._learner, self._link, self._publisher = learner, link, publisher
        self._offer: Offer | None = None
        self._commands: dict[str, Callable[[Command], object]] = {
            "load": lambda _: learner.load(),
            "restore": self._restore,
            "train": lambda _: learner.train(link.receive_rows()),
            "encode": self._encode,
            "save": self._save,
        }

    async def run(self, compute: ComputeThread) -> None:
        """Serve until rank 0 says stop.

        Raises:
            SluiceError, Exception: what a command failed with; rank 0 has been told.
        """
        computing = compute.run(self._compute, deadline_s=FOR_GOOD_S, what="serving rank 0")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(computing)
            tasks.create_task(self._publish())

    def _compute(self) -> None:
        while (command := self._link.next("compute"))["do"] != "stop":
            try:
                self._commands[command["do"]](command)
            except BaseException as error:
                if command["may_fail"] and isinstance(error, Exception):
                    log.warning("command failed, as it may", command=command["do"], error=str(error))
                else:
                    self._link.done(f"{type(error).__name__}: {error}")
                    raise
            self._link.done()

    def _restore(self, command: Command) -> None:
        self._stand_at(command)
        self._learner.restore(command["epoch"], command["checkpoint"])

    def _encode(self, command: Command) -> None:
        self._stand_at(command)
        self._offer = self._learner.encode(self._publisher, command["deadline_s"])

    def _save(self, command: Command) -> None:
        self._stand_at(command)
        self._learner.snapshot(command["journal_position"])  # rank 0 hears of a failure, and tells of it

    def _stand_at(self, command: Command) -> None:
        """Take over what only rank 0 counts."""
        self._learner.version = Version.parse(command["version"])
        self._learner.last_batch_id = command["last_batch_id"]

    async def _publish(self) -> None:
        """Push this rank's part whenever rank 0 pushes its own; rank 0 hears of every failure and decides what is repeated."""
        while (command := await asyncio.to_thread(self._link.next, "publish"))["do"] != "stop":
            offer = self._offer
            if offer is None or str(offer.version) != command["version"]:
                raise RuntimeError(f"rank 0 publishes {command['version']}, this rank holds {offer and offer.version}")
            try:
                await offer.push(deadline_s=command["deadline_s"])
            except SluiceError as error:
                if error.reason == "RANK_LOST":
                    raise
                log.warning("push failed; rank 0 decides what follows", version=command["version"], error=str(error))
