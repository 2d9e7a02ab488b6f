"""Say which service is missing: one that has waited long for another logs its name, its address, why it cannot be reached, and what to do.

A service that can wait goes on waiting and says so again; its requests have deadlines of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import structlog

from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, ConfigError
from sluice.doctor.finding import State
from sluice.doctor.peers import check_peer
from sluice.rpc.channel import wait_until_serving
from sluice.rpc.readiness import Readiness

log = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def missing_peers_reported(
    peers: Mapping[str, str], common: CommonConfig, readiness: Readiness | None = None, clock: Clock = CLOCK
) -> AsyncIterator[None]:
    """While the block runs, log an error each time that `peers_start_s` have passed and a peer has not served yet.

    The service is not ready before each of them has served once.

    Args:
        peers: Addresses of the services that this one needs, by name.
        common: Deadline, tokens and TLS.
        readiness: That of the service.
        clock: Tells how long a peer has been missing.
    """
    waits = {
        peer: asyncio.create_task(_report_until_serving(peer, target, common, clock), name=f"waits for {peer}")
        for peer, target in peers.items()
    }
    if readiness is not None:
        readiness.add(lambda: [f"{peer}: it has not served yet" for peer, wait in waits.items() if not wait.done()])
    try:
        yield
    finally:
        for wait in waits.values():
            wait.cancel()
        await asyncio.gather(*waits.values(), return_exceptions=True)


async def _report_until_serving(peer: str, target: str, common: CommonConfig, clock: Clock) -> None:
    started = clock()
    while True:
        try:
            async with clock.timeout(common.peers_start_s):
                await wait_until_serving(target, common.security)
        except TimeoutError:
            finding = await check_peer(peer, target, common.security)
            if finding.state is not State.OK:
                log.error(  # noqa: TRY400 - the fields say all
                    "a service that this one needs is missing; waiting on",
                    peer=peer,
                    address=target,
                    waited_s=round(clock() - started, 1),
                    reason=finding.found.removeprefix(f"{target}: "),
                    remedy=finding.remedy,
                )
        except ConfigError:
            return  # the service itself reads the same token or certificate, and ends with that reason
        else:
            return
