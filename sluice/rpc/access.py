"""Who may reach a server: addresses, TLS, and bearer tokens of two roles, read from files and compared in constant time."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from pathlib import Path
from typing import Literal

import grpc

from sluice.config import ConfigError, SecurityConfig, ServerConfig
from sluice.rpc.errors import SluiceError

LOOPBACK = "127.0.0.1"

UNIX = "unix:"

Role = Literal["agent", "admin"]
"""`agent`: inference, episodes, environments. `admin`: everything."""

_SCHEME = "Bearer "


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
    missing = []
    if security.tls_cert is None:
        missing.append("TLS (security.tls_cert, security.tls_key)")
    if security.admin_token_file is None:
        missing.append("tokens (security.token_file, security.admin_token_file)")
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


def _read(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror}") from error
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigError(
            f"token file {path} must hold one line of ASCII without blanks, such as `openssl rand -hex 32` prints"
        )
    return token


def client_token(security: SecurityConfig, role: Role) -> str | None:
    """Return the token that a client of this role sends; the other role's if only that is configured; None without any."""
    preferred, other = security.admin_token_file, security.token_file
    if role == "agent":
        preferred, other = other, preferred
    path = preferred or other
    return None if path is None else _read(path)


class TokenCheck:
    """Decides whether a call's ``authorization`` metadata has the role that its service asks for."""

    def __init__(self, security: SecurityConfig) -> None:
        self._agent = None if security.token_file is None else _read(security.token_file).encode()
        self._admin = None if security.admin_token_file is None else _read(security.admin_token_file).encode()
        if self._agent is not None and self._admin is None:
            raise ConfigError(
                "security.token_file without security.admin_token_file would leave the admin RPCs unusable;"
                " set both (they may name the same file)"
            )

    @property
    def open(self) -> bool:
        """Whether no token is configured, so that every call passes."""
        return self._admin is None

    def verify(self, authorization: str | bytes | None, role: Role) -> None:
        """Check one call.

        Raises:
            SluiceError: UNAUTHENTICATED without a known token, PERMISSION_DENIED with a token of the lesser role.
        """
        if self._admin is None:
            return
        given = authorization.encode() if isinstance(authorization, str) else authorization or b""
        scheme, token = given[: len(_SCHEME)], given[len(_SCHEME) :]
        # Both comparisons always run, so that the time does not reveal which token was closer.
        is_admin = hmac.compare_digest(token, self._admin)
        is_agent = self._agent is not None and hmac.compare_digest(token, self._agent)
        if scheme.lower() != _SCHEME.lower().encode() or not (is_admin or is_agent):
            raise SluiceError(
                grpc.StatusCode.UNAUTHENTICATED,
                "TOKEN_REQUIRED",
                "send the metadata `authorization: Bearer TOKEN` with a token of this server"
                " (security.token_file or security.admin_token_file)",
            )
        if role == "admin" and not is_admin:
            raise SluiceError(
                grpc.StatusCode.PERMISSION_DENIED,
                "ADMIN_REQUIRED",
                "this call needs the admin token (security.admin_token_file); the token given has the role agent",
            )
