"""From configured addresses to one target per replica: a name may stand for several."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable

import structlog

__all__ = ["check_address", "resolve_targets"]

DNS = "dns:///"
UNIX = "unix:"
LOOKUP_DEADLINE_S = 5.0

log = structlog.get_logger(__name__)


def check_address(address: str) -> None:
    """Check the form of an address.

    Raises:
        ValueError: if it is neither ``host:port``, with or without ``dns:///``, nor ``unix:PATH``.
    """
    host, _, port = address.removeprefix(DNS).rpartition(":")
    if address.startswith(UNIX):
        valid = len(address) > len(UNIX)
    else:
        valid = port.isdecimal() and 0 < int(port) < 1 << 16 and (_is_literal(host) or _is_name(host))
    if not valid:
        raise ValueError(f"{address!r} is no address: give host:port or unix:PATH")


async def resolve_targets(addresses: Iterable[str]) -> list[str]:
    """Return the targets behind some addresses, in order, each once.

    ``unix:/path`` and literal addresses stand for themselves, names (with or without ``dns:///``) for every address that
    they resolve to now. A name that does not resolve is left out: it may later. So is what cannot be an address.
    """
    found: dict[str, None] = {}
    for address in addresses:
        for target in await _targets(address):
            found[target] = None
    return list(found)


async def _targets(address: str) -> list[str]:
    try:
        check_address(address)
    except ValueError as error:
        log.debug("replica skipped", reason=str(error))
        return []
    host, _, port = address.removeprefix(DNS).rpartition(":")
    if address.startswith(UNIX) or _is_literal(host):
        return [address.removeprefix(DNS)]
    try:
        async with asyncio.timeout(LOOKUP_DEADLINE_S):
            rows = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        log.debug("replica name does not resolve", name=host, error=str(error))
        return []
    return sorted(f"[{row[4][0]}]:{port}" if row[0] is socket.AF_INET6 else f"{row[4][0]}:{port}" for row in rows)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _is_name(host: str) -> bool:
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False
