"""The replicas of one machine, in a process of their own: they share one staged copy, and compute nothing.

The real run of `sluice bench scale` has them, and the measurement of what the weight path costs. This module, run as a program, is them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from benchmarks.children import program
from benchmarks.simulated_services import (
    Counting,
    Counts,
    Load,
    SimulatedReplica,
    counted,
    read_counts,
    serving,
    until_signal,
)
from benchmarks.weight_stack import RUN, StagedOnly
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.telemetry import configure_logging
from sluice.versions import Version
from weightsync.receiver import ReceiverOptions, WeightReceiver
from weightsync.staged import ApplyReport, StagedVersion

_START_S = 120.0
_LOOK_S = 0.5
"""Seconds between two questions to a machine about its version: answering is work of the measured process."""


@contextlib.asynccontextmanager
async def machine(targets: Sequence[str], weights: str, stage_dir: Path, log: Path, load: Load) -> AsyncIterator[None]:
    """Run the replicas of a machine until the block ends. The block begins when they can be asked.

    Args:
        targets: Addresses at which they serve, one for each.
        weights: Address of the weight service, or relay, that they follow.
        stage_dir: Directory in shared memory, for staged versions.
        log: File for their output.
        load: How slowly they answer, and with how many tokens.
    """
    words = [
        f"--weights={weights}",
        f"--stage-dir={stage_dir}",
        f"--latency-s={load.latency_s}",
        f"--spread={load.spread}",
        f"--tokens={load.tokens}",
    ]
    async with program("benchmarks.fleet.node", *words, "--targets", *targets, log=log):
        async with connect(targets[0], SecurityConfig()) as channel, asyncio.timeout(_START_S):
            await channel.channel_ready()
        yield


class Arrival(NamedTuple):
    """How a machine took its last version.

    Attributes:
        begun_at: When the first replica learned of it, in seconds of `time.monotonic`.
        pull_s: Seconds from then to the last byte, at the replica that made the staged copy.
        served_at: When the last replica served it.
    """

    begun_at: float
    pull_s: float
    served_at: float


def last_arrival(counts: Counts) -> Arrival:
    """Return how a machine took its last version, from what one of its replicas counted."""
    served = {name: times[-1][-1] for name, times in counts.notes["served"].items()}
    updates = counts.notes["updates"]
    begun = {name: served[name] - total_s for name, (_, total_s) in updates.items()}
    maker = max(updates, key=lambda name: updates[name][0])
    return Arrival(min(begun.values()), begun[maker] + updates[maker][0] - min(begun.values()), max(served.values()))


def served_at(counts: Counts, version: Version) -> list[float]:
    """Return when replicas of a machine first served a version or a newer one, in seconds of `time.monotonic`.

    Args:
        counts: What a replica of the machine counted.
        version: Replicas that do not serve this version yet are left out.
    """
    firsts = (
        next((at for epoch, number, at in times if Version(epoch, number) >= version), None)
        for times in counts.notes["served"].values()
    )
    return [at for at in firsts if at is not None]


async def all_serve(target: str, version: Version, replicas: int, deadline_s: float) -> Counts:
    """Wait until all replicas of a machine serve a version or a newer one; return what one of them counted until then.

    Raises:
        RuntimeError: if they do not within the deadline.
    """
    give_up = time.monotonic() + deadline_s
    while len(served := served_at(counts := await read_counts(target), version)) < replicas:
        if time.monotonic() > give_up:
            behind = replicas - len(served)
            raise RuntimeError(f"{behind} replicas did not take version {version} within {deadline_s:g} s")
        await asyncio.sleep(_LOOK_S)
    return counts


# The program.


class _Node:
    """The replicas of one machine, which share one staged copy."""

    def __init__(self) -> None:
        self.receivers: dict[str, WeightReceiver] = {}
        self.served: defaultdict[str, list[tuple[int, int, float]]] = defaultdict(list)
        """Epoch and number of each version that a replica served, and when."""
        self.messages: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()

    def notes(self) -> dict[str, Any]:
        """Return the machine's counts of messages with weight services, when replicas served versions, and the seconds of its last version.

        These are the seconds of the transfer, and the total seconds.
        """
        updates = {
            name: (last.pull_s, last.total_s)
            for name, receiver in self.receivers.items()
            if (last := receiver.status().last_update) is not None
        }
        return {"served": self.served, "messages": self.messages, "sizes": self.sizes, "updates": updates}

    def counting(self, method: str, translate: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        """Return a translation that also counts the messages that it translates."""
        return counted(translate, method.rpartition("/")[2], self.messages, self.sizes)


class _CountedChannel:
    """A channel that counts the messages of its calls."""

    def __init__(self, channel: grpc.aio.Channel, node: _Node) -> None:
        self._channel, self._node = channel, node

    def unary_unary(self, method: str, *words: Any, **options: Any) -> Any:  # noqa: ANN401 - a call of gRPC
        """Return a call with one answer."""
        return self._channel.unary_unary(method, *words, **self._counting(method, options))

    def unary_stream(self, method: str, *words: Any, **options: Any) -> Any:  # noqa: ANN401 - a call of gRPC
        """Return a call with a stream of answers."""
        return self._channel.unary_stream(method, *words, **self._counting(method, options))

    def stream_unary(self, method: str, *words: Any, **options: Any) -> Any:  # noqa: ANN401 - a call of gRPC
        """Return a call with a stream of requests."""
        return self._channel.stream_unary(method, *words, **options)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    def _counting(self, method: str, options: dict[str, Any]) -> dict[str, Any]:
        for name in ("request_serializer", "response_deserializer"):
            options[name] = self._node.counting(method, options.get(name))
        return options


class _FollowingEngine(StagedOnly):
    """Serves staged versions, and notes when."""

    def __init__(self, replica: SimulatedReplica, times: list[tuple[int, int, float]]) -> None:
        super().__init__()
        self._replica, self._times = replica, times

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        """Serve a version."""
        report = await super().apply(staged)
        self._replica.serve(staged.version)
        self._times.append((staged.version.epoch, staged.version.number, time.monotonic()))
        return report


async def _run(options: argparse.Namespace) -> None:
    node, counting = _Node(), Counting()
    counting.notes = node.notes
    load = Load(options.latency_s, options.spread, options.tokens)

    def connected(target: str) -> Any:  # noqa: ANN401 - in place of a channel
        return _CountedChannel(connect(target, SecurityConfig()), node)

    async def follow(target: str, replica: SimulatedReplica) -> None:
        name = f"replica-{target}"
        receiver = node.receivers[name] = WeightReceiver(
            connected(options.weights),
            RUN,
            name,
            options.stage_dir,
            _FollowingEngine(replica, node.served[name]),
            options=ReceiverOptions(local_files=False, connect_to=connected),
        )
        await receiver.run_forever()

    replicas = {target: SimulatedReplica(f"replica-{target}", load) for target in options.targets}
    async with contextlib.AsyncExitStack() as stack:
        for target, replica in replicas.items():
            handlers = replica.handlers()
            await stack.enter_async_context(
                serving([target], lambda server, own=handlers: server.add_generic_rpc_handlers(own), counting)  # type: ignore[misc]
            )
        await until_signal(*(follow(target, replica) for target, replica in replicas.items()))


def main() -> None:
    """Run the replicas of a machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", required=True, help="addresses to serve at, one for each replica")
    parser.add_argument("--weights", required=True, help="address of the weight service or of a relay")
    parser.add_argument("--stage-dir", type=Path, required=True, help="directory for staged versions")
    parser.add_argument("--latency-s", type=float, required=True, help="mean seconds of a request")
    parser.add_argument("--spread", type=float, required=True, help="share of it by which requests differ")
    parser.add_argument("--tokens", type=int, required=True, help="tokens of a sample")
    options = parser.parse_args()
    configure_logging("bench", "warning")
    asyncio.run(_run(options))


if __name__ == "__main__":
    main()
