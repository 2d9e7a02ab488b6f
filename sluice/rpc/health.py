"""Ask a server by grpc.health.v1 whether it serves."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.config import SecurityConfig
from sluice.rpc.channel import connect

__all__ = ["health_status", "wait_until_serving"]

_POLL_S = 0.1
"""Pause between two questions to a server that does not serve yet, in seconds."""

_ANSWER_S = 5.0
"""Seconds that one question may take."""


async def health_status(target: str, security: SecurityConfig, service: str = "", timeout_s: float = _ANSWER_S) -> int:
    """Return a server's `HealthCheckResponse.ServingStatus`.

    Args:
        target: ``host:port``, ``dns:///name:port`` or ``unix:/path``.
        security: Tokens and TLS.
        service: Fully qualified name of a service; empty asks for the whole server.
        timeout_s: Seconds to wait for the answer.

    Raises:
        grpc.aio.AioRpcError: if the server does not answer.
    """
    async with connect(target, security, role="agent") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)  # type: ignore[attr-defined]  # the stubs leave it out
        return int(answer.status)


async def wait_until_serving(target: str, security: SecurityConfig) -> None:
    """Return once a server answers SERVING. There is no deadline: the caller sets one.

    Args:
        target: ``host:port``.
        security: Tokens and TLS.
    """
    host, _, port = target.rpartition(":")
    while True:
        # An attempt to connect costs nothing, and avoids gRPC's back-off between its own attempts.
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(_POLL_S)
            continue
        writer.close()
        with contextlib.suppress(grpc.aio.AioRpcError):
            if await health_status(target, security) == health_pb2.HealthCheckResponse.SERVING:
                return
        await asyncio.sleep(_POLL_S)
