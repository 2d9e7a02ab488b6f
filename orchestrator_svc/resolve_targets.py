"""From configured addresses to one target per replica: a name may stand for several."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable

import structlog

__all__ = ["resolve_targets"]

DNS = "dns:///"
LOOKUP_DEADLINE_S = 5.0

log = structlog.get_logger(__name__)


async def resolve_targets(addresses: Iterable[str]) -> list[str]:
    """Targets behind some addresses, in order, each once.

    ``unix:/path`` and literal addresses stand for themselves, names (with or without ``dns:///``) for every address that
    they resolve to now. A name that does not resolve is left out: it may later.
    """
    found: dict[str, None] = {}
    for address in addresses:
        for target in await _targets(address):
            found[target] = None
    return list(found)


async def _targets(address: str) -> list[str]:
    host, _, port = address.removeprefix(DNS).rpartition(":")
    if address.startswith("unix:") or not port.isdecimal() or _is_literal(host):
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
