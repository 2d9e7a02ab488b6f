"""Certificates of this process: read and check them, and read them again when their files change.

Servers present the newest certificate at each handshake, and check clients against the newest authorities. An open connection keeps the
certificates of its handshake, so servers end it after `security.connection_age_s`. `sluice.rpc.channel` does the same for clients.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from sluice.errors import ConfigError
from sluice.rpc.from_files import FromFiles

if TYPE_CHECKING:  # a client needs grpcio and protobuf alone
    from sluice.config import SecurityConfig
    from sluice.rpc.client_security import Security

WHAT = "the TLS certificate"


class Pem(NamedTuple):
    """The contents of `tls_key`, `tls_cert` and `tls_ca`; None for what is not set."""

    key: bytes | None
    certificate: bytes | None
    authorities: bytes | None


def pem_files(security: Security) -> FromFiles[Pem] | None:
    """Return the certificate, key and authorities of a process, which follow their files; None if none is set.

    Raises:
        ConfigError: if a file cannot be read, or key and certificate do not belong together.
    """
    files = _files(security)
    return FromFiles(WHAT, files, lambda _: _read(security)) if files else None


def server_credentials(security: SecurityConfig) -> grpc.ServerCredentials | None:
    """Return credentials for one port of a gRPC server, mutual if configured; None without a certificate.

    Raises:
        ConfigError: as `pem_files`.
    """
    if security.tls_cert is None:
        return None
    pem = pem_files(security)
    if pem is None:
        return None
    shown = pem.current()

    def changed() -> Any:  # noqa: ANN401 - the stubs leave out that None is allowed
        """Return what the next handshakes use; None leaves it as it is. gRPC calls this at each handshake."""
        nonlocal shown
        newest = pem.current()
        if newest is shown:
            return None
        shown = newest
        return _configuration(newest, security)

    return grpc.dynamic_ssl_server_credentials(_configuration(shown, security), changed, security.require_client_cert)


def _configuration(pem: Pem, security: SecurityConfig) -> grpc.ServerCertificateConfiguration:
    pairs = [(pem.key, pem.certificate)] if pem.key is not None and pem.certificate is not None else []
    return grpc.ssl_server_certificate_configuration(
        pairs, root_certificates=pem.authorities if security.require_client_cert else None
    )


def server_context(security: SecurityConfig, clients: ssl.VerifyMode) -> ssl.SSLContext | None:
    """Return the context of an HTTPS port; None without a certificate.

    Args:
        security: The certificate, and the authorities that clients are checked against.
        clients: Whether clients need a certificate, provided that `security` demands checks of clients.

    Raises:
        ConfigError: as `pem_files`.
    """
    if security.tls_cert is None:
        return None
    contexts = FromFiles(WHAT, _files(security), lambda _: _context(security, clients))
    context = contexts.current()

    def use_newest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = contexts.current()

    # OpenSSL calls this in every handshake, also if the client names no server.
    context.sni_callback = use_newest
    return context


def certificate_names(certificate: Mapping[str, Any]) -> frozenset[str]:
    """Return common name and URIs of a client's certificate, as `ssl` describes one; empty without one."""
    common = [value for pairs in certificate.get("subject", ()) for key, value in pairs if key == "commonName"]
    uris = [value for key, value in certificate.get("subjectAltName", ()) if key == "URI"]
    return frozenset([*common, *uris])


def _context(security: SecurityConfig, clients: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # A client that resumes a session presents no certificate. So one whose certificate is refused by now would be let in.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    _load_pair(context, security)
    if security.require_client_cert:
        _load_authorities(context, security)
        context.verify_mode = clients
    return context


def _files(security: Security) -> list[Path]:
    return [path for path in (security.tls_key, security.tls_cert, security.tls_ca) if path is not None]


def _read(security: Security) -> Pem:
    """Read the files, and let OpenSSL check them, since gRPC accepts any content and then fails at each handshake.

    Raises:
        ConfigError: if a file cannot be read or is not PEM, or key and certificate do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_pair(context, security)
    _load_authorities(context, security)
    key, certificate, authorities = (
        None if path is None else path.read_bytes() for path in (security.tls_key, security.tls_cert, security.tls_ca)
    )
    return Pem(key, certificate, authorities)


def _load_pair(context: ssl.SSLContext, security: Security) -> None:
    if security.tls_cert is None or security.tls_key is None:
        return
    for path in (security.tls_cert, security.tls_key):
        _check_readable(path)
    try:
        context.load_cert_chain(security.tls_cert, security.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"security.tls_cert {security.tls_cert} and security.tls_key {security.tls_key} cannot be used: {_why(error)}; does the"
            " key belong to the certificate, and are both PEM?"
        ) from error


def _load_authorities(context: ssl.SSLContext, security: Security) -> None:
    if security.tls_ca is None:
        return
    _check_readable(security.tls_ca)
    try:
        context.load_verify_locations(security.tls_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"security.tls_ca {security.tls_ca} cannot be used: {_why(error)}; it must hold certificates in PEM"
        ) from error


def _check_readable(path: Path) -> None:
    """Open a file, since OpenSSL does not say which one it could not read."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(
            f"cannot read the key or certificate {path}: {error.strerror}; correct security.tls_cert, tls_key or tls_ca"
        ) from error


def _why(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else error.strerror or str(error)
