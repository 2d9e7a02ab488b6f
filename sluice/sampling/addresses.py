"""Addresses of replicas: validate them, and resolve names."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable

import structlog

from sluice.rpc.channel import UNIX

log = structlog.get_logger(__name__)

_DNS = "dns:///"
_LOOKUP_S = 5.0
"""Seconds that the resolver may take for one name."""


def check_address(address: str) -> None:
    """Check the form of an address.

    Raises:
        ValueError: if it is neither ``host:port``, with or without ``dns:///``, nor ``unix:PATH``.
    """
    host, _, port = address.removeprefix(_DNS).rpartition(":")
    if address.startswith(UNIX):
        valid = len(address) > len(UNIX)
    else:
        valid = port.isdecimal() and 0 < int(port) < 1 << 16 and (_is_literal(host) or _is_name(host))
    if not valid:
        raise ValueError(f"{address!r} is no address: give host:port or unix:PATH")


def canonical(address: str) -> str:
    """Return the canonical spelling of an address, so that two spellings of the same address compare equal.

    Literal addresses are written as in RFC 5952, IPv4-mapped IPv6 addresses as IPv4, and names in lower case without ``dns:///``.

    Args:
        address: An address that has passed `check_address`.
    """
    if address.startswith(UNIX):
        return address.replace("unix://", UNIX, 1)
    host, _, port = address.removeprefix(_DNS).rpartition(":")
    if not _is_literal(host):
        return f"{host.lower()}:{int(port)}"
    literal = literal_ip(host)
    return f"[{literal}]:{int(port)}" if literal.version == 6 else f"{literal}:{int(port)}"


async def resolve_targets(addresses: Iterable[str]) -> list[str]:
    """Return the targets of some addresses, in order, without duplicates.

    ``unix:/path`` and literal addresses are targets themselves, in their canonical form. A name (with or without ``dns:///``) gives every
    address that it resolves to now. Names that do not resolve, which they may do later, and malformed addresses are left out.
    """
    found = await asyncio.gather(*map(_resolve, addresses))
    return list(dict.fromkeys(target for targets in found for target in targets))


def is_fixed(address: str) -> bool:
    """Return whether an address is a target itself, so that no name has to be resolved."""
    return address.startswith(UNIX) or _is_literal(address.rpartition(":")[0])


async def _resolve(address: str) -> list[str]:
    try:
        check_address(address)
        address = canonical(address)
        if is_fixed(address):
            return [address]
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(_LOOKUP_S):
            rows = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (ValueError, OSError, TimeoutError) as error:
        log.debug("replica address skipped", address=address, error=str(error))
        return []
    hosts = {f"[{row[4][0]}]" if row[0] is socket.AF_INET6 else row[4][0] for row in rows}
    return sorted({canonical(f"{each}:{port}") for each in hosts})


def _is_literal(host: str) -> bool:
    try:
        literal_ip(host)
    except ValueError:
        return False
    return True


def literal_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address that `host` spells; an IPv4-mapped IPv6 address as IPv4.

    Raises:
        ValueError: if `host` is a name.
    """
    address = ipaddress.ip_address(host.strip("[]"))
    return getattr(address, "ipv4_mapped", None) or address


def _is_name(host: str) -> bool:
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False
