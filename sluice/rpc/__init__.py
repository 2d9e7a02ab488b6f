"""Servers and channels on grpc.aio: TLS, roles, deadlines, retries, health, reflection, typed errors, metrics, drain."""

from __future__ import annotations

from sluice.rpc.channel import MAX_MESSAGE_BYTES, MAX_SAMPLES, connect
from sluice.rpc.errors import SluiceError
from sluice.rpc.server import RpcServer

__all__ = ["MAX_MESSAGE_BYTES", "MAX_SAMPLES", "RpcServer", "SluiceError", "connect"]
