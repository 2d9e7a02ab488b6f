"""Whether a service can do its work, and what it waits for otherwise, as text for people.

A service has three answers of grpc.health.v1. ``sluice.v1.ServerInfoService`` is SERVING as long as the event loop answers: liveness.
The empty name is SERVING once the service answers its calls, such as when its model is loaded. `READY_SERVICE` is SERVING when it
has what it needs of others too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import structlog
from prometheus_client import Gauge

from sluice.rpc.errors import SluiceError

Servicer = TypeVar("Servicer")

READY_SERVICE = "sluice.ready"
"""Name under which grpc.health.v1 says whether the service is ready. It is no service of a contract."""

READY_PATH = "/ready"
"""Route of HTTP ports that says the same, without a token."""

READY = Gauge("sluice_ready", "1 if the service has all that it needs for its work, 0 while it waits.")

log = structlog.get_logger(__name__)


class Readiness:
    """What a service waits for. It looks when it is asked, so that no state can be forgotten.

    The texts may be shown on an HTTP port without a token: they name services and causes, no addresses.

    Attributes:
        own: What the service itself has to finish before it serves; empty if it serves.
    """

    def __init__(self) -> None:
        self.own = ""
        self._looks: list[Callable[[], Iterable[str]]] = []
        self._last: list[str] | None = None

    def add(self, look: Callable[[], Iterable[str]]) -> None:
        """Add a cause.

        Args:
            look: Returns what the service waits for now, nothing if it does not wait. Takes no time.
        """
        self._looks.append(look)

    def waits_for(self) -> list[str]:
        """Return what the service waits for; nothing if it is ready."""
        if self.own:
            return [self.own]
        return [text for look in self._looks for text in look()]

    def look(self) -> list[str]:
        """Return what the service waits for, after logging it if it differs from the last look."""
        waits = self.waits_for()
        READY.set(not waits)
        if waits != self._last:
            if waits:
                log.info("waits for", causes=waits)
            elif self._last is not None:
                log.info("ready")
            self._last = waits
        return waits


class Later(Generic[Servicer]):
    """Stands in for a servicer while its service starts: the port is open, and calls are answered UNAVAILABLE until it is built.

    Args:
        kind: Class of the servicer. The server reports the methods that this class implements.
        why: Text for callers: what the service does meanwhile, and what to do.
        retry_s: Seconds after which a caller may retry.

    Attributes:
        registered: The object to register at the server in place of the servicer.
        servicer: The servicer; None until it is built. Calls reach it from then on.
    """

    def __init__(self, kind: type[Servicer], why: str, retry_s: float = 1.0) -> None:
        self._why, self._retry_s = why, retry_s
        self.servicer: Servicer | None = None
        methods = {
            name: self._method(name) for name, value in vars(kind).items() if name[0].isupper() and callable(value)
        }
        # The base classes have the methods that `kind` does not implement.
        self.registered: Any = type(kind.__name__, kind.__bases__, methods)()

    def _method(self, name: str) -> Callable[..., Any]:
        def call(_self: object, request: object, context: object) -> Any:  # noqa: ANN401 - as the method of the servicer
            if self.servicer is None:
                raise SluiceError.unavailable("STARTING", self._why, self._retry_s)
            return getattr(self.servicer, name)(request, context)

        return call
