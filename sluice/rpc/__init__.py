"""Servers and channels on grpc.aio: TLS, roles, deadlines, retries, health, reflection, typed errors, metrics, drain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice.limits import MAX_MESSAGE_BYTES, MAX_SAMPLES
from sluice.rpc.channel import connect
from sluice.rpc.client_security import ClientSecurity
from sluice.rpc.errors import SluiceError

if TYPE_CHECKING:
    from sluice.rpc.server import RpcServer

__all__ = ["MAX_MESSAGE_BYTES", "MAX_SAMPLES", "ClientSecurity", "RpcServer", "SluiceError", "connect"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the type is that of RpcServer
    """Import the server when a service asks for it: clients need grpcio and protobuf alone."""
    if name == "RpcServer":
        from sluice.rpc.server import RpcServer  # noqa: PLC0415

        return RpcServer
    raise AttributeError(f"module 'sluice.rpc' has no attribute {name!r}")
