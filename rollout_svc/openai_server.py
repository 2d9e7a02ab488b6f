"""Serves an ASGI app in the event loop that serves gRPC, with the same TLS and the same care about where it listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import structlog
import uvicorn
from starlette.types import ASGIApp

from sluice.config import ConfigError, SecurityConfig, ServerConfig
from sluice.rpc import binding

__all__ = ["HttpServer"]

LOOPBACK = "127.0.0.1"

STEP_S = 0.05
"""How often a start is looked at; uvicorn has no event for it."""

START_DEADLINE_S = 10.0

MARGIN_S = 2.0
"""What uvicorn may take beyond the drain to close its connections."""

log = structlog.get_logger()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """An HTTP server with a beginning and an end.

    Args:
        app: What to serve.
        host: Address to bind; where gRPC listens on a unix socket, HTTP listens on loopback.
        port: TCP port; 0 picks a free one.
        security: TLS, and whether an unprotected address is allowed.

    Raises:
        ConfigError: if the address would show an unprotected server to the network.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, security: SecurityConfig) -> None:
        self._host = LOOPBACK if host.startswith(binding.UNIX) else host.strip("[]")
        binding.check_exposure(ServerConfig(host=self._host, port=port), security)
        self._port, self._security = port, security
        self._uvicorn = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                ssl_certfile=security.tls_cert,
                ssl_keyfile=security.tls_key,
                ssl_ca_certs=str(security.tls_ca) if security.require_client_cert else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if security.require_client_cert else ssl.CERT_NONE,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Bind and serve.

        Returns:
            The bound port.

        Raises:
            ConfigError: if the address cannot be bound or the certificate cannot be read.
        """
        listener = self._bind()
        port = int(listener.getsockname()[1])
        try:
            self._uvicorn.config.load()
        except (OSError, ssl.SSLError) as error:
            listener.close()
            raise ConfigError(f"cannot use security.tls_cert and security.tls_key: {error}") from error
        self._serving = asyncio.create_task(self._uvicorn.serve([listener]))
        async with asyncio.timeout(START_DEADLINE_S):
            while not self._uvicorn.started and not self._serving.done():
                await asyncio.wait({self._serving}, timeout=STEP_S)
        if self._serving.done():
            await self._serving
        log.info("listening", url=f"{self._scheme}://{self._host}:{port}")
        return port

    async def stop(self, grace: float = 5.0) -> None:
        """Take no new connections, give requests in progress `grace` seconds, then cancel them. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        self._uvicorn.config.timeout_graceful_shutdown = max(1, round(grace)) if grace else 0
        self._uvicorn.should_exit = True
        _, late = await asyncio.wait({serving}, timeout=grace + MARGIN_S)
        if late:
            log.warning("http server did not stop in time", grace_s=grace)
            serving.cancel()
            await asyncio.wait({serving})
        else:
            serving.result()
        # uvicorn cancels what outlives the drain but does not wait for it.
        if self._uvicorn.server_state.tasks:
            await asyncio.wait(set(self._uvicorn.server_state.tasks), timeout=MARGIN_S)

    @property
    def _scheme(self) -> str:
        return "https" if self._security.tls_cert is not None else "http"

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            return socket.create_server((self._host, self._port), family=family, backlog=2048)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port} for HTTP: {error.strerror or error}; is the port taken? "
                "set server.http_port, 0 picks a free one"
            ) from error
