"""Report missing peers: a service that has waited long for a peer logs the peer's name and address, the reason, and what to do.

The service keeps waiting and repeats the message, until it has waited too long for a peer that never served. Its requests have deadlines
of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

import structlog

from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, ConfigError, MissingPeerError
from sluice.doctor.finding import State
from sluice.doctor.peers import check_peer
from sluice.rpc.channel import wait_until_serving

if TYPE_CHECKING:
    from sluice.rpc import RpcServer

log = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def missing_peers_reported(
    peers: Mapping[str, str], common: CommonConfig, server: RpcServer, clock: Clock = CLOCK, *, gives_up: bool = True
) -> AsyncIterator[None]:
    """While the block runs, log an error each time that `peers_start_s` have passed and a peer has not served yet.

    The service is not ready before each peer has served once. If a peer has not served within `peers_give_up_s`, the service drains.

    Args:
        peers: Addresses of the services that this one needs, by name.
        common: Deadlines, tokens and TLS.
        server: The service's own server, which serves in the block.
        clock: Measures how long a peer has been missing.
        gives_up: False for a service that has a deadline of its own for its peers.

    Raises:
        MissingPeerError: after the block, if the service drained because a peer never served.
    """
    give_up_s = (common.peers_give_up_s if gives_up else 0.0) or math.inf
    waits = {
        peer: asyncio.create_task(_wait_for(peer, target, common, give_up_s, clock), name=f"waits for {peer}")
        for peer, target in peers.items()
    }
    failed: list[MissingPeerError] = []

    def ended(wait: asyncio.Task[None]) -> None:
        if not wait.cancelled() and isinstance(error := wait.exception(), MissingPeerError):
            failed.append(error)
            server.begin_drain(server.drain_s)

    for wait in waits.values():
        wait.add_done_callback(ended)
    server.readiness.add(lambda: [f"{peer}: it has not served yet" for peer, wait in waits.items() if not wait.done()])
    try:
        yield
    finally:
        for wait in waits.values():
            wait.cancel()
        await asyncio.gather(*waits.values(), return_exceptions=True)
    if failed:
        raise failed[0]


async def _wait_for(peer: str, target: str, common: CommonConfig, give_up_s: float, clock: Clock) -> None:
    """Return once a peer has served.

    Raises:
        MissingPeerError: if it has not served within `give_up_s`.
    """
    started = clock()
    while True:
        left_s = started + give_up_s - clock()
        try:
            async with clock.timeout(min(common.peers_start_s, left_s)):
                await wait_until_serving(target, common.security)
        except TimeoutError:
            finding = await check_peer(peer, target, common.security)
            if finding.state is State.OK:
                return
            waited_s = round(clock() - started, 1)
            reason = finding.found.removeprefix(f"{target}: ")
            if waited_s >= give_up_s:
                raise MissingPeerError(
                    f"{peer} at {target} has not served for {waited_s:g} s (peers_give_up_s): {reason}; {finding.remedy}"
                ) from None
            log.error(  # noqa: TRY400 - the fields have all details
                "a service that this one needs is missing; waiting on",
                peer=peer,
                address=target,
                waited_s=waited_s,
                reason=reason,
                remedy=finding.remedy,
            )
        except ConfigError:
            return  # the service itself reads the same token or certificate, and ends with this error
        else:
            return
