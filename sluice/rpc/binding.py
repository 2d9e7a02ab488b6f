"""Where a server may listen, and with which credentials."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import grpc

from sluice.config import ConfigError, SecurityConfig, ServerConfig

__all__ = ["LOOPBACK", "UNIX", "address", "check_exposure", "free_ports", "read_pem", "server_credentials"]

LOOPBACK = "127.0.0.1"

UNIX = "unix:"


def address(server: ServerConfig) -> str:
    """Return the address that gRPC binds: ``host:port``, ``[v6]:port`` or ``unix:/path``."""
    if server.host.startswith(UNIX):
        return server.host
    host = f"[{server.host}]" if ":" in server.host and not server.host.startswith("[") else server.host
    return f"{host}:{server.port}"


def free_ports(count: int) -> list[int]:
    """Return TCP ports on loopback that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def is_local(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host.startswith(UNIX) or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(server: ServerConfig, security: SecurityConfig) -> None:
    """Refuse to expose an unprotected server to the network.

    Raises:
        ConfigError: if the address is not local, and TLS or tokens are missing, and `insecure` is not set.
    """
    if security.insecure or is_local(server.host):
        return
    missing = [
        what
        for what, present in (
            ("TLS (security.tls_cert, security.tls_key)", security.tls_cert is not None),
            ("tokens (security.token_file, security.admin_token_file)", security.admin_token_file is not None),
        )
        if not present
    ]
    if missing:
        raise ConfigError(
            f"refusing to listen on {server.host} without {' and '.join(missing)}:"
            " set them, bind 127.0.0.1, or say --insecure if the network is trusted"
        )


def read_pem(path: Path) -> bytes:
    """Return the bytes of a key or certificate file.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def server_credentials(server: ServerConfig, security: SecurityConfig) -> grpc.ServerCredentials | None:
    """Return the server's TLS credentials, mutual if configured; None on a unix socket or without a certificate."""
    if server.host.startswith(UNIX) or security.tls_cert is None or security.tls_key is None:
        return None
    authorities = read_pem(security.tls_ca) if security.tls_ca is not None else None
    return grpc.ssl_server_credentials(
        [(read_pem(security.tls_key), read_pem(security.tls_cert))],
        root_certificates=authorities if security.require_client_cert else None,
        require_client_auth=security.require_client_cert,
    )
