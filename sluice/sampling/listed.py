"""Replicas from the orchestrator's list, for a service without configured replicas: a gateway."""

from __future__ import annotations

import grpc
import structlog

from sluice.backoff import Backoff
from sluice.rpc import SluiceError
from sluice.rpc.channel import TOO_OLD
from sluice.sampling.pool import ReplicaPool
from sluice.v1 import session_pb2, session_pb2_grpc

_REPLACED_S = 0.5
"""Seconds to wait after an orchestrator shuts down, before its absence is logged as a warning: it may be replaced. Less than the second
after which its successor takes a gateway for dead."""

log = structlog.get_logger(__name__)

KEPT_S = 30.0
"""Seconds for which a replica is still used after it is no longer listed. A restarted orchestrator learns of its replicas one by one, and
of the last one only after a lease."""


class ListedReplicas:
    """Chooses the replicas to use, from one list to the next. Pure: the caller passes the time."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._missing_since: dict[str, float] = {}

    def take(self, listed: session_pb2.WatchReplicasResponse, now: float) -> dict[str, str]:
        """Return the names of the replicas to use, by address.

        Args:
            listed: The latest list from the orchestrator.
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
    """Let a pool use the replicas that the orchestrator lists, until cancelled. While the orchestrator is unreachable, keep the last list.

    Args:
        pool: Uses the replicas. It finds out itself which of them work.
        sessions: The orchestrator, called with the role gateway.
        gateway: The caller's name, so that the orchestrator ends its claims soon after it was killed.
    """
    # One second after a break the orchestrator takes a gateway for dead. The first attempt comes earlier.
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
            ):  # the run has ended, or the orchestrator is being replaced: not a problem by itself
                log.info("the orchestrator is shutting down")
                await pool.clock.sleep(_REPLACED_S)
                continue
            problem = str(error)
        if not backoff.failures:
            log.warning(
                "the orchestrator lists no replicas, so those that are known stay in use; trying again", error=problem
            )
        await pool.clock.sleep(backoff.fail())
