"""A servicer whose service still starts: its port is open, and its calls are answered UNAVAILABLE until the servicer is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from sluice.rpc.errors import SluiceError

Servicer = TypeVar("Servicer")


class Later(Generic[Servicer]):
    """Stands for a servicer until it is built.

    Args:
        kind: Its class; what that implements is what the server says of its methods.
        why: What the service does meanwhile and what to do, for callers.
        retry_s: Seconds after which a caller may ask again.

    Attributes:
        registered: What to register at the server in its place.
        servicer: The servicer; None until it is built. Calls reach it from then on.
    """

    def __init__(self, kind: type[Servicer], why: str, retry_s: float = 1.0) -> None:
        self._why, self._retry_s = why, retry_s
        self.servicer: Servicer | None = None
        methods = {
            name: self._method(name) for name, value in vars(kind).items() if name[0].isupper() and callable(value)
        }
        # Its bases bring the methods that it leaves out.
        self.registered: Any = type(kind.__name__, kind.__bases__, methods)()

    def _method(self, name: str) -> Callable[..., Any]:
        def call(_self: object, request: object, context: object) -> Any:  # noqa: ANN401 - as the method of the servicer
            if self.servicer is None:
                raise SluiceError.unavailable("STARTING", self._why, self._retry_s)
            return getattr(self.servicer, name)(request, context)

        return call
