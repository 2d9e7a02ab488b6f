"""Refuses requests that a web page makes the browser of the user send to a server on this machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

import grpc

from sluice.rpc import SluiceError
from sluice.rpc.access import is_local

__all__ = ["BrowserCheck", "require_json"]

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that neither change anything nor start a computation."""

JSON = "application/json"


def require_json(method: str, headers: Mapping[str, str]) -> None:
    """Refuse a request that could change something and whose content type is not JSON.

    A page can make a browser send a form or plain text to any server. To send JSON, the browser first asks the server by CORS,
    and ours never agrees.

    Raises:
        SluiceError: INVALID_ARGUMENT with the reason `JSON_REQUIRED`.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method not in SAFE_METHODS and kind != JSON:
        raise SluiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "JSON_REQUIRED",
            f"send the header `content-type: {JSON}`, even without a body",
        )


class BrowserCheck:
    """Checks the headers `Host` and `Origin` of a request to a server without tokens.

    An attacker may let a name of theirs resolve to this machine (DNS rebinding): then `Host` has that name. `Origin` names the
    page that made the browser send the request.

    Args:
        host: Address that the server is bound to.
    """

    def __init__(self, host: str) -> None:
        self._bound = host.strip("[]").lower()
        self._loopback = is_local(self._bound)

    def verify(self, headers: Mapping[str, str]) -> None:
        """Check one request.

        Raises:
            SluiceError: PERMISSION_DENIED with the reason `HOST_NOT_ALLOWED` or `ORIGIN_NOT_ALLOWED`.
        """
        host = headers.get("host", "")
        # A server that is bound to the network may have names that it does not know; then only the origin is checked.
        if self._loopback and not self._allowed(f"//{host}"):
            raise _denied(
                "HOST_NOT_ALLOWED",
                f"the request is addressed to {host[:100]!r}: use localhost or 127.0.0.1, or protect the server by tokens "
                "(security.admin_token_file)",
            )
        origin = headers.get("origin")
        if origin is not None and not self._allowed(origin):
            raise _denied(
                "ORIGIN_NOT_ALLOWED",
                f"the page {origin[:100]!r} may not use this server: pages of this machine may, or protect the server by "
                "tokens (security.admin_token_file)",
            )

    def _allowed(self, url: str) -> bool:
        try:
            name = (urlsplit(url).hostname or "").lower()
        except ValueError:
            return False
        if name == self._bound or is_local(name):
            return True
        return not self._loopback and _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _denied(reason: str, message: str) -> SluiceError:
    return SluiceError(grpc.StatusCode.PERMISSION_DENIED, reason, message)
