"""Replicas that the orchestrator lists, for a service that has none of its own: a gateway."""

from __future__ import annotations

import asyncio
import time

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration

from sluice.backoff import Backoff
from sluice.rpc import SluiceError
from sluice.sampling.pool import ReplicaPool
from sluice.v1 import session_pb2, session_pb2_grpc

log = structlog.get_logger(__name__)

_WAIT_S = 30.0
"""Seconds that the orchestrator may wait for another list before it answers."""

_ANSWER_S = 10.0
"""Seconds that its answer may take beyond that."""

_LEAST_PAUSE_S = 0.05
"""Least seconds between two lists."""

KEPT_S = 30.0
"""Seconds for which a replica is used that is no longer listed. An orchestrator that was restarted learns of its replicas one after
the other, the last one after a lease."""


class ListedReplicas:
    """Which replicas to use, from one list to the next. Pure: the caller passes the time."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._missing_since: dict[str, float] = {}

    def take(self, listed: session_pb2.ListReplicasResponse, now: float) -> dict[str, str]:
        """Return the names of the replicas to use, by address.

        Args:
            listed: The list that the orchestrator answered.
            now: The time in seconds.
        """
        present = {each.address for each in listed.replicas}
        missing = {address: self._missing_since.get(address, now) for address in self._names.keys() - present}
        self._missing_since = {address: since for address, since in missing.items() if now - since < KEPT_S}
        self._names = {address: self._names[address] for address in self._missing_since} | {
            each.address: each.replica for each in listed.replicas if each.usable
        }
        return dict(self._names)

    def next_end_s(self, now: float) -> float:
        """Return the seconds until a replica that is no longer listed is no longer used; infinity if there is none."""
        return min((since + KEPT_S - now for since in self._missing_since.values()), default=float("inf"))


async def follow_list(pool: ReplicaPool, sessions: session_pb2_grpc.SessionServiceAsyncStub) -> None:
    """Let a pool use the replicas that the orchestrator lists, until cancelled. While it does not answer, they stay as they are.

    Args:
        pool: Uses them; it sees by itself which of them work.
        sessions: The orchestrator, called with the role gateway.
    """
    replicas, backoff, digest = ListedReplicas(), Backoff(), b""
    while True:
        wait = Duration()
        wait.FromMilliseconds(int(1000 * max(0.0, min(_WAIT_S, replicas.next_end_s(time.monotonic())))))
        request = session_pb2.ListReplicasRequest(known_digest=digest, wait=wait)
        try:
            listed = await sessions.ListReplicas(request, timeout=_WAIT_S + _ANSWER_S)
        except grpc.aio.AioRpcError as error:
            if not backoff.failures:
                log.warning(
                    "the orchestrator lists no replicas, so those that are known stay in use; trying again",
                    error=str(SluiceError.from_rpc(error)),
                )
            digest = b""
            await asyncio.sleep(backoff.fail())
            continue
        backoff.succeed()
        digest = listed.digest
        pool.use(replicas.take(listed, time.monotonic()))
        await asyncio.sleep(_LEAST_PAUSE_S)
