"""The port of the Prometheus metrics: HTTP or HTTPS in a thread, for the principals that the other ports know."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from sluice.config import SecurityConfig, ServerConfig
from sluice.rpc.access import Access, check_exposure
from sluice.rpc.errors import SluiceError
from sluice.rpc.tls import certificate_names, server_context

log = structlog.get_logger(__name__)


CERTIFICATE = "sluice.certificate"
"""Key of the names in the client's certificate, in the environment of a request."""


class _Server(ThreadingWSGIServer):
    """One thread a request: a client that reads slowly stops nobody else."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    """Ends a connection that says nothing, and writes no line for each request."""

    timeout = 10.0

    def get_environ(self) -> dict[str, Any]:
        """Return what an application gets, with the names of the client's certificate."""
        shown = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
        return {**super().get_environ(), CERTIFICATE: certificate_names(shown or {})}

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 - as in the base class
        """Write nothing."""


def start_metrics_server(port: int, host: str, security: SecurityConfig) -> WSGIServer:
    """Serve the metrics from a thread, and return the server. They hold counts and times, no prompts and no secrets.

    Args:
        port: TCP port; 0 picks a free one.
        host: Address to bind.
        security: Any principal may read the metrics, by its token or certificate; without principals everyone may. With a certificate, by
            TLS.

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
        # The handshake is left to the thread of the connection.
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
