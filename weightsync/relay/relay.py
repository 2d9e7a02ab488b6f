"""A weight service that takes its versions from another one: same contract towards engines, no pushes."""

from __future__ import annotations

import asyncio
import math
import socket

import grpc

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from weightsync.relay.follower import Follower
from weightsync.service.run import RELAY_PREFIX, Run
from weightsync.service.runs import Runs

__all__ = ["Relay", "RelayCycleError", "advertised_address", "relay_name"]

_WILDCARDS = {"0.0.0.0", "::", "[::]"}
_LONGEST_ADDRESS = 120
"""What a replica's name has room for."""

_QUESTION_S = 5.0
"""Seconds that the service behind has to say whether it has a run."""


class RelayCycleError(Exception):
    """Relays feed each other, so that no version can ever reach them."""


def advertised_address(configured: str | None, target: str) -> str:
    """Return where others reach a server.

    Args:
        configured: What the operator says, if anything.
        target: What is bound: ``host:port`` or ``unix:/path``.
    """
    if configured:
        return configured
    host, separator, port = target.rpartition(":")
    return f"{socket.gethostname()}{separator}{port}" if host in _WILDCARDS else target


def relay_name(address: str) -> str:
    """Return the name under which a relay reports itself."""
    return f"{RELAY_PREFIX}{address[-_LONGEST_ADDRESS:]}"


class Relay:
    """The service behind a relay: followed in every run that somebody asks for, and sent the replicas' reports.

    Args:
        channel: To that service, with the admin role, which a relay needs to report as one.
        target: Its address, for messages.
    """

    def __init__(self, channel: grpc.aio.Channel, target: str) -> None:
        self.target = target
        self._channel = channel
        self._followers: dict[str, Follower] = {}
        self._group: asyncio.TaskGroup | None = None
        self._following: list[asyncio.Task[None]] = []
        self._address = ""
        self._cycle = asyncio.Event()

    async def run_forever(self, address: str) -> None:
        """Follow until cancelled.

        Args:
            address: Where engines reach this relay.

        Raises:
            RelayCycleError: if the service behind leads back to this relay.
        """
        self._address = address
        try:
            async with asyncio.TaskGroup() as self._group:
                for follower in self._followers.values():
                    self._begin(self._group, follower)
                await self._cycle.wait()
                for task in self._following:
                    task.cancel()
        finally:
            self._group = None
        raise RelayCycleError(
            f"{self.target} takes its versions from this relay, {address}: set weightsync.upstream of one of them"
            " to the service that the trainer pushes to"
        )

    async def has(self, resource: str) -> bool:
        """Return whether the service behind has the run named ``runs/{run}``.

        Raises:
            SluiceError: what the service behind answered, or UNAVAILABLE.
        """
        stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(self._channel)
        try:
            await stub.ListSources(pb.ListSourcesRequest(run=resource), timeout=_QUESTION_S)
        except grpc.aio.AioRpcError as error:
            failure = SluiceError.from_rpc(error)
            if failure.code is grpc.StatusCode.NOT_FOUND:
                return False
            raise failure from error
        return True

    def follow(self, runs: Runs, run: Run) -> None:
        """Bring the versions of the service behind into a run from now on."""
        self._followers[run.name] = Follower(runs, run, self._channel)
        if self._group is not None:
            self._begin(self._group, self._followers[run.name])

    def report(self, run: Run, request: pb.ReportVersionRequest) -> None:
        """Forward a replica's report.

        Raises:
            SluiceError: RELAY_CYCLE, if it is this relay's own report, which came back by way of the service behind.
        """
        if self._address and request.replica == relay_name(self._address):
            self._cycle.set()
            raise SluiceError.failed_precondition(
                "RELAY_CYCLE", f"relay {self._address} got its own report: its upstream {self.target} leads back to it"
            )
        self._followers[run.name].forwarder.put(request)

    def lease_s(self, run: Run) -> float:
        """Return the seconds that the service behind grants; infinite before its first answer."""
        follower = self._followers.get(run.name)
        return math.inf if follower is None else follower.forwarder.lease_s

    def connected(self, run: str) -> bool:
        """Return whether the service behind answers for the run."""
        return run in self._followers and self._followers[run].connected

    def _begin(self, group: asyncio.TaskGroup, follower: Follower) -> None:
        following = follower.run_forever(relay_name(self._address), self._address)
        self._following.append(group.create_task(following))
