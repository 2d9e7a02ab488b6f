"""One rollout replica as the orchestrator sees it: its channel, what it last said, and whether it gets work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from sluice.config import SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.v1 import orchestrator_pb2, rollout_pb2, rollout_pb2_grpc
from sluice.versions import BASE, Version

__all__ = ["Replica"]

_FIRST_COOLDOWN_S = 0.2
_LONGEST_COOLDOWN_S = 10.0
"""After failed work a replica is left alone, twice as long each time: answering polls is not the same as working."""

_READY = {rollout_pb2.REPLICA_STATE_SERVING, rollout_pb2.REPLICA_STATE_PAUSED}
"""A pause is short (an update) or an operator's wish: requests queue at the replica."""


class Replica:
    """A replica.

    Args:
        target: Its address.
        security: Tokens and TLS.
        evict_after: Failed polls in a row after which it gets no work.
        clock: Monotonic seconds.
    """

    def __init__(
        self, target: str, security: SecurityConfig, evict_after: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.target = target
        self.status = rollout_pb2.GetStatusResponse()
        self.model = rollout_pb2.GetModelResponse()
        self.version: Version = BASE
        self.in_flight = 0
        self.calls: set[asyncio.Future[Any]] = set()
        self.seen = False
        self._channel = connect(target, security)
        self.rollout = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self.admin = rollout_pb2_grpc.RolloutAdminServiceStub(self._channel)
        self._evict_after, self._clock = evict_after, clock
        self._failed_polls = 0
        self._failed_work = 0
        self._rest_until = 0.0
        self._last_error = "has not answered yet"

    @property
    def name(self) -> str:
        """Its own name, or its address until it told it."""
        return self.status.replica or self.target

    @property
    def evicted(self) -> bool:
        """Whether it failed too many polls in a row to get work."""
        return self._failed_polls >= self._evict_after

    def cancel_calls(self) -> None:
        """Cancel the calls under way; whoever made them makes them elsewhere."""
        for call in self.calls:
            call.cancel()

    async def poll(self, deadline_s: float) -> None:
        """Ask for its status; failures are remembered rather than raised."""
        try:
            if not self.model.model:
                self.model = await self.rollout.GetModel(rollout_pb2.GetModelRequest(), timeout=deadline_s)
            status = await self.admin.GetStatus(rollout_pb2.GetStatusRequest(), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            self._failed_polls += 1
            self._last_error = str(SluiceError.from_rpc(error))
            if self.evicted:
                self.model.Clear()  # whatever comes back may serve another model
            return
        self.status = status
        self.version = Version.from_proto(status.policy_version)
        self.seen, self._failed_polls = True, 0

    def work_failed(self, error: SluiceError) -> None:
        """A request failed there: leave it alone for a while."""
        self._last_error = str(error)
        rest = min(_LONGEST_COOLDOWN_S, _FIRST_COOLDOWN_S * 2**self._failed_work)
        self._failed_work += 1
        self._rest_until = self._clock() + rest

    def work_succeeded(self, version: Version) -> None:
        """A request succeeded there; `version` sampled its last token."""
        self._failed_work = 0
        self._rest_until = 0.0
        self.version = max(self.version, version)

    def why_not(self, wanted: Version | None = None) -> str:
        """Why it gets no work, empty if it does."""
        if not self.seen or self.evicted:
            return f"does not answer: {self._last_error}"
        if self.status.state not in _READY:
            return f"is {rollout_pb2.ReplicaState.Name(self.status.state).removeprefix('REPLICA_STATE_').lower()}"
        if self._clock() < self._rest_until:
            return f"failed lately: {self._last_error}"
        if wanted is not None and self.version < wanted:
            return f"serves version {self.version}, wanted is {wanted} or newer"
        return ""

    def describe(self, wanted: Version | None = None) -> orchestrator_pb2.Replica:
        """For operators."""
        reason = self.why_not(wanted)
        return orchestrator_pb2.Replica(
            replica=self.name,
            address=self.target,
            policy_version=self.version.to_proto(),
            eligible=not reason,
            reason=reason,
            running=self.in_flight,
        )

    async def close(self) -> None:
        """Close its channel."""
        await self._channel.close()
