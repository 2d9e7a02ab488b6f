"""The port of the Prometheus metrics: HTTP or HTTPS in a thread, for the same principals as the other ports."""

from __future__ import annotations

import io
import ipaddress
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from sluice.config import SecurityConfig, ServerConfig
from sluice.limits import HEAD_S, MAX_HEAD_BYTES, MAX_METRICS_CONNECTIONS
from sluice.rpc.access import Access, check_exposure
from sluice.rpc.errors import SluiceError
from sluice.rpc.tls import certificate_names, server_context

log = structlog.get_logger(__name__)


CERTIFICATE = "sluice.certificate"
"""Key in a request's environment for the names in the client's certificate."""


class _Server(ThreadingWSGIServer):
    """Serves each connection in a thread of its own, so that a few clients that read slowly do not block the others."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - as in the base class
        super().__init__(*args, **options)
        self._places = threading.BoundedSemaphore(MAX_METRICS_CONNECTIONS)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ANN401 - as in the base class
        """Take a place for a connection; return whether there is one."""
        return super().verify_request(request, client_address) and self._places.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base class
        """Start the thread of a connection; if it cannot be started, give the place back."""
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base class
        """Serve a connection, and give its place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base class
        """Log nothing about clients that leave, do not send HTTP or a handshake, or are slow."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    """Reads the head of a request, with limits of size and time. Does not log requests."""

    timeout = HEAD_S

    def setup(self) -> None:
        """Read the head of the request.

        Raises:
            OSError: if it is too late or too large.
        """
        super().setup()
        self.rfile = io.BufferedReader(io.BytesIO(self._head()))

    def _head(self) -> bytes:
        head, end = bytearray(), time.monotonic() + HEAD_S
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            self.connection.settimeout(max(1e-3, end - time.monotonic()))
            part = self.connection.recv(4096)
            if not part or len(head) > MAX_HEAD_BYTES:
                raise ConnectionError(f"no head of a request within {MAX_HEAD_BYTES} bytes")
            head += part
        self.connection.settimeout(HEAD_S)
        return bytes(head)

    def get_environ(self) -> dict[str, Any]:
        """Return the environment of a request, with the names in the client's certificate."""
        shown = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
        return {**super().get_environ(), CERTIFICATE: certificate_names(shown or {})}

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 - as in the base class
        """Write nothing."""


def start_metrics_server(port: int, host: str, security: SecurityConfig) -> WSGIServer:
    """Serve the metrics from a thread, and return the server. They hold counts and times, no prompts and no secrets.

    Args:
        port: TCP port; 0 picks a free one.
        host: Address to bind.
        security: Any principal may read the metrics, with its token or certificate; without principals everyone may. TLS is used if it
            has a certificate.

    Raises:
        OSError: if the address cannot be bound.
        ConfigError: if the principals or the certificate cannot be read, or the address needs TLS and principals that are not configured.
    """
    check_exposure(ServerConfig(host=host), security)
    access, context = Access(security), server_context(security, ssl.CERT_OPTIONAL)
    metrics: Callable[..., Iterable[bytes]] = make_wsgi_app()

    def guarded(environment: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        try:
            access.identify(environment.get("HTTP_AUTHORIZATION"), environment[CERTIFICATE])
        except SluiceError as error:
            respond("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [f"{error.message}\n".encode()]
        return metrics(environment, respond)

    kind = _Server6 if _is_ipv6(host) else _Server
    server = make_server(host, port, guarded, kind, handler_class=_Quiet)
    scheme = "http"
    if context is not None:
        # The thread of the connection does the handshake.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        scheme = "https"
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    log.info("metrics", url=f"{scheme}://{host}:{server.server_port}/metrics")
    return server


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
