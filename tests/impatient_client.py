"""An HTTP transport whose time limit passes when a test says so."""

from __future__ import annotations

import asyncio

import httpx


class ImpatientTransport(httpx.AsyncHTTPTransport):
    """Sends requests; `give_up` ends those that wait for their response, as a read timeout of the client does.

    Attributes:
        sent: Requests so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0
        self._waiting: set[asyncio.Task[httpx.Response]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += 1
        waiting = asyncio.create_task(super().handle_async_request(request))
        self._waiting.add(waiting)
        try:
            await asyncio.wait({waiting})
        finally:
            self._waiting.discard(waiting)
            waiting.cancel()
        if waiting.cancelled():
            raise httpx.ReadTimeout("the test let the time of this request pass", request=request)
        return waiting.result()

    def give_up(self) -> None:
        """Let the time of the requests pass that wait now."""
        for waiting in self._waiting:
            waiting.cancel()
