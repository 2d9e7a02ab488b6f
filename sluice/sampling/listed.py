"""Replicas that the orchestrator lists, for a service that has none of its own: a gateway."""

from __future__ import annotations

import grpc
import structlog

from sluice.backoff import Backoff
from sluice.rpc import SluiceError
from sluice.rpc.channel import TOO_OLD
from sluice.sampling.pool import ReplicaPool
from sluice.v1 import session_pb2, session_pb2_grpc

_REPLACED_S = 0.5
"""Seconds that an orchestrator which shuts down gets to be replaced, before its absence is a warning; less than the second after which it takes a gateway for dead."""

log = structlog.get_logger(__name__)

KEPT_S = 30.0
"""Seconds for which a replica is used that is no longer listed. An orchestrator that was restarted learns of its replicas one after
the other, the last one after a lease."""


class ListedReplicas:
    """Which replicas to use, from one list to the next. Pure: the caller passes the time."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._missing_since: dict[str, float] = {}

    def take(self, listed: session_pb2.WatchReplicasResponse, now: float) -> dict[str, str]:
        """Return the names of the replicas to use, by address.

        Args:
            listed: What the orchestrator sent last.
            now: The time in seconds.
        """
        present = {each.address for each in listed.replicas}
        missing = {address: self._missing_since.get(address, now) for address in self._names.keys() - present}
        self._missing_since = {address: since for address, since in missing.items() if now - since < KEPT_S}
        self._names = {address: self._names[address] for address in self._missing_since} | {
            each.address: each.replica for each in listed.replicas if each.usable
        }
        return dict(self._names)


async def follow_list(pool: ReplicaPool, sessions: session_pb2_grpc.SessionServiceAsyncStub, gateway: str = "") -> None:
    """Let a pool use the replicas that the orchestrator lists, until cancelled. While it is away, they stay as they are.

    Args:
        pool: Uses them; it sees by itself which of them work.
        sessions: The orchestrator, called with the role gateway.
        gateway: The caller's name: its claims end soon after it was killed.
    """
    # The first attempt after a break comes within the second after which the orchestrator takes a gateway for dead.
    replicas, backoff = ListedReplicas(), Backoff()
    while True:
        problem = "it ended the list"
        try:
            async for listed in sessions.WatchReplicas(session_pb2.WatchReplicasRequest(gateway=gateway)):
                backoff.succeed()
                pool.use(replicas.take(listed, pool.clock()))
        except grpc.aio.AioRpcError as failure:
            error = SluiceError.from_rpc(failure)
            if error.reason == TOO_OLD:
                continue
            if (
                error.reason == "DRAINING"
            ):  # the run has ended, or the orchestrator is replaced: only what follows is a problem
                log.info("the orchestrator is shutting down")
                await pool.clock.sleep(_REPLACED_S)
                continue
            problem = str(error)
        if not backoff.failures:
            log.warning(
                "the orchestrator lists no replicas, so those that are known stay in use; trying again", error=problem
            )
        await pool.clock.sleep(backoff.fail())
