"""A connection that can be told to turn one bit over."""

from __future__ import annotations

import contextlib
import socket
import threading

from weight_faults.process import DEADLINE_S

__all__ = ["Wire"]

_BULK_BYTES = 2048
"""A piece of this size holds bytes of a chunk, not the protocol's small talk."""


class Wire:
    """Passes bytes between clients and a service.

    Args:
        target: Port of the service on loopback.

    Attributes:
        port: Port for the clients.
        damaged: Set when a bit was turned over.
    """

    def __init__(self, target: int) -> None:
        self.damaged = threading.Event()
        self._target = target
        self._due = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def damage_next(self) -> None:
        """Turn over one bit of the next large piece that comes along in either direction."""
        self._due.set()

    def close(self) -> None:
        """Take no more clients."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    service = socket.create_connection(("127.0.0.1", self._target), DEADLINE_S)
                except OSError:
                    client.close()
                    continue
                service.settimeout(None)
                for source, sink in ((client, service), (service, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := bytearray(source.recv(1 << 16)):
                if self._due.is_set() and len(piece) >= _BULK_BYTES:
                    self._due.clear()
                    piece[len(piece) // 2] ^= 1
                    self.damaged.set()
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
