"""TCP ports that belong to a test for as long as it wants, for programs that need their address before they start or again later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def held_ports(count: int, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """Hold ports for the block: servers can listen at them, and nobody gets one of them by chance. Until a server listens, connections are refused.

    If a socket is bound with SO_REUSEADDR and does not listen, servers that set SO_REUSEADDR (as all of ours do) can still use its port.
    The kernel does not give the port to a program that asks for any free port.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind((host, 0))
        yield [int(each.getsockname()[1]) for each in sockets]
