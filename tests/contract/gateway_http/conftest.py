"""A gateway that listens on loopback, with sessions in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio
import httpx
import pytest
import pytest_asyncio
from memory_sessions import MemorySession, MemorySessions
from simulated_clock import LIMIT_S, SimulatedClock

from gateway_svc.config import CaptureConfig
from gateway_svc.http import create_app
from sluice.config import SecurityConfig
from sluice.openai.server import HttpServer
from sluice.rpc.access import Access
from sluice.rpc.call_log import CallLog


@dataclass
class Gateway:
    url: str
    sessions: MemorySessions
    session: MemorySession
    server: HttpServer
    clock: SimulatedClock

    def http(self, transport: httpx.AsyncBaseTransport | None = None, **headers: str) -> httpx.AsyncClient:
        """A client without any library of a dialect, with the key of the session unless it is given another one.

        The port has no TLS: without `verify=False` it would read the list of authorities, which takes longer than a request.
        """
        given = {"authorization": f"Bearer {self.session.key}"} | headers
        sent = {k: v for k, v in given.items() if v}
        return httpx.AsyncClient(base_url=self.url, headers=sent, timeout=LIMIT_S, transport=transport, verify=False)


@asynccontextmanager
async def running_gateway(
    security: SecurityConfig | None = None, capture: CaptureConfig | None = None, call_log: CallLog | None = None
) -> AsyncIterator[Gateway]:
    """Start a gateway. Requests are held for a time that passes when a test moves its clock."""
    security = security or SecurityConfig()
    sessions, clock = MemorySessions(), SimulatedClock()
    app = create_app(sessions, capture or CaptureConfig(), Access(security), "127.0.0.1", clock, call_log=call_log)
    server = HttpServer(app, "127.0.0.1", 0, security)
    port = await server.start()
    try:
        yield Gateway(f"http://127.0.0.1:{port}", sessions, sessions.new(), server, clock)
    finally:
        sessions.serving.set()
        with anyio.CancelScope(shield=True):
            await server.stop(grace=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Gateway]:
    async with running_gateway() as started:
        yield started


@pytest.fixture
def gateway(server: Gateway) -> Iterator[Gateway]:
    """The gateway of the module, with no session but a new one."""
    server.sessions.reset()
    server.session = server.sessions.new()
    yield server
    server.sessions.serving.set()


@pytest.fixture
def another_gateway() -> Callable[..., AbstractAsyncContextManager[Gateway]]:
    """Starts a gateway with settings of the test's own."""
    return running_gateway
