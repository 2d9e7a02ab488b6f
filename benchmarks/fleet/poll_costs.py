"""What a fleet costs the process that dispatches to it, whether it has work or not: status requests, and looks for a replica.

The pool is the real one. One process serves at as many addresses of the loopback network as there are replicas, so that each has a
connection and a channel of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from benchmarks.children import free_port
from benchmarks.simulated_services import Counting, Load, SimulatedReplica, read_counts, serve_until_signal
from sluice.config import SecurityConfig
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.pool import ReplicaPool
from sluice.telemetry import configure_logging
from sluice.versions import BASE

_LOOKS = 50
_START_S = 120.0
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class PollCosts:
    """Measurements for a number of replicas.

    Attributes:
        polls_per_s: Status requests a second.
        cpu_per_s: CPU seconds of this process per second; everything that the pool does regularly is included.
        poll_bytes: Bytes of such a request and its answer.
        pick_s: CPU seconds to search for a replica and check that there is room.
    """

    replicas: int
    polls_per_s: float
    cpu_per_s: float
    poll_bytes: float
    pick_s: float


def measure(replicas: int, seconds: float) -> PollCosts:
    """Measure with `replicas` replicas for `seconds` seconds. Call this in a process of its own."""
    configure_logging("bench", "warning")  # a line per replica would be measured too
    return asyncio.run(_measure(replicas, seconds))


async def _measure(replicas: int, seconds: float) -> PollCosts:
    port = free_port()
    addresses = _addresses(replicas, port)
    async with _served(replicas, port):
        pool = ReplicaPool(addresses, SecurityConfig(), ReplicasConfig(), lambda _: None)
        running = asyncio.create_task(pool.run())
        try:
            give_up = time.monotonic() + _START_S
            while sum(not each.why_not() for each in pool.replicas) < replicas:
                if time.monotonic() > give_up:
                    raise RuntimeError(f"only some of {replicas} replicas answered within {_START_S:g} s")
                await asyncio.sleep(_LOOK_AGAIN_S)
            before, begun, cpu_s = await read_counts(addresses[0]), time.monotonic(), time.process_time()
            await asyncio.sleep(seconds)
            counts, spent = (await read_counts(addresses[0])).since(before), time.process_time() - cpu_s
            elapsed = time.monotonic() - begun
            picking = time.thread_time()  # other threads read answers meanwhile
            for _ in range(_LOOKS):
                pool.has_room(0)
                pool.pick(BASE)
            picked = time.thread_time() - picking
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    polls = counts.messages["GetStatus"] / 2
    return PollCosts(replicas, polls / elapsed, spent / elapsed, counts.sizes["GetStatus"] / polls, picked / _LOOKS)


def _addresses(replicas: int, port: int) -> list[str]:
    """Return `replicas` addresses of this machine."""
    return [f"127.1.{number // 250}.{number % 250 + 1}:{port}" for number in range(replicas)]


@contextlib.asynccontextmanager
async def _served(replicas: int, port: int) -> AsyncIterator[None]:
    command = (sys.executable, "-m", "benchmarks.fleet.poll_costs", f"--replicas={replicas}", f"--port={port}")
    # gRPC logs for each connection that it ends with its server.
    child = await asyncio.create_subprocess_exec(*command, env={**os.environ, "GRPC_VERBOSITY": "NONE"})
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        await child.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve as many replicas without work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(argv)
    replica = SimulatedReplica("replica", Load(1.0, 0.0, 1))
    addresses = _addresses(options.replicas, options.port)
    asyncio.run(
        serve_until_signal(addresses, lambda server: server.add_generic_rpc_handlers(replica.handlers()), Counting())
    )


if __name__ == "__main__":
    main()
