"""How much a server holds for its clients, known or not: connections, and the bytes of what they send."""

from __future__ import annotations

from collections.abc import Hashable


class Connections:
    """The open connections of one port, and their limit. Pure.

    If there are too many, take the peer with the most connections that wait for the head of a request, and close the one of these that
    has waited longest. So connections on which a request is served stay open, and so do connections of peers with few.

    Args:
        most: How many may be open.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._peers: dict[Hashable, str] = {}
        self._waiting: dict[str, dict[Hashable, None]] = {}
        """By peer, the connections that wait for a head, in the order in which they began to wait."""

    def __len__(self) -> int:
        return len(self._peers)

    def open(self, connection: Hashable, peer: str) -> Hashable | None:
        """Account for a new connection, which waits for a head. Return the connection to close in exchange; None if there is room."""
        self._peers[connection] = peer
        self.wait(connection)
        if len(self._peers) <= self._most:
            return None
        longest = max(self._waiting.values(), key=len)
        closed = next(iter(longest))
        self.close(closed)
        return closed

    def wait(self, connection: Hashable) -> None:
        """Note that a connection waits for a head from now on, unless it does already."""
        if (peer := self._peers.get(connection)) is not None:
            self._waiting.setdefault(peer, {}).setdefault(connection)

    def serve(self, connection: Hashable) -> None:
        """Note that a request of a connection is served."""
        peer = self._peers.get(connection, "")
        if (waiting := self._waiting.get(peer)) is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._waiting[peer]

    def close(self, connection: Hashable) -> None:
        """Forget a connection."""
        self.serve(connection)
        self._peers.pop(connection, None)


class Room:
    """The bytes of all requests in progress, and their limit. Pure.

    The last quarter is reserved for callers that hold little, so that a caller that sends much does not keep the others out.

    Args:
        most: How many bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Hashable, int] = {}
        self.held = 0

    def take(self, tenant: Hashable, size: int) -> bool:
        """Account for bytes of a caller. Return whether there was room; call `give_back` in either case."""
        own = self._held[tenant] = self._held.get(tenant, 0) + size
        self.held += size
        return self.held <= (self._most if own <= self._most // 64 else self._most * 3 // 4)

    def give_back(self, tenant: Hashable, size: int) -> None:
        """Account for the end of a request."""
        self.held -= size
        own = self._held.get(tenant, 0) - size
        self._held.pop(tenant, None)
        if own > 0:
            self._held[tenant] = own
