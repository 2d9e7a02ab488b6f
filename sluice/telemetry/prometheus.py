"""The process's Prometheus metrics: one registry, shared with the libraries (vLLM's metrics appear beside ours)."""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest, start_http_server

__all__ = ["CONTENT_TYPE", "MetricsServer", "metrics_text", "start_metrics_server"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Content type of `metrics_text`."""

log = structlog.get_logger(__name__)


def metrics_text() -> bytes:
    """All metrics of the process in Prometheus' text format, for a service that has an HTTP port of its own."""
    return generate_latest(REGISTRY)


class MetricsServer:
    """A running ``/metrics`` endpoint."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self.port = int(server.server_port)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop serving; returns when its thread has ended or after `timeout_s` seconds."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout_s)


def start_metrics_server(port: int, host: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics from a thread.

    Args:
        port: TCP port; 0 picks a free one.
        host: Address to bind; the metrics hold counts and times, no prompts and no secrets.

    Raises:
        OSError: if the address cannot be bound.
    """
    server, thread = start_http_server(port, addr=host)
    running = MetricsServer(server, thread)
    log.info("metrics", url=f"http://{host}:{running.port}/metrics")
    return running
