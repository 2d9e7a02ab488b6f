"""A simulated fleet: the real scheduler and the real ledger of the weight service on a simulated clock and network.

What is real: `Scheduler` and the journal's `Ledger` decide when a group starts and what makes a batch, `coalescing_s` how many messages a
stream has, `choose` from which source an engine takes versions, and the weight service's `Ledger` and `chain` what a
replica has to pull. What is simulated: time, links, and processes, each of which does one thing at a time and takes the measured
CPU seconds for it.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.dispatch import Orchestrator
from benchmarks.fleet.fleet import Fleet, Limits, Network, Work, World
from benchmarks.fleet.network import Process
from weightsync.receive.pull import PullLimits

NEVER = sys.maxsize
"""Stands for a limit that no number of replicas reaches."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit, and how far it is used.

    Attributes:
        name: The setting, or the resource.
        used: How much of the limit is used.
        most: How much there is.
        moved_by: What to change to move the limit.
        squared: Part of `used` that grows with the square of the number of replicas.
        grows: Whether its use grows in proportion to the replicas. In a tree of relays many times the replicas take one more level.
        is_setting: Whether a setting alone moves it; else it is a limit of the machine.
    """

    name: str
    used: float
    most: float
    moved_by: str
    is_setting: bool = False
    squared: float = 0.0
    grows: bool = True

    @property
    def share(self) -> float:
        """Return the used share of the limit; above 1 it is exceeded."""
        return self.used / self.most

    def reached_at(self, replicas: int) -> int:
        """Return the number of replicas at which it is reached, according to `grows` and `squared`; `NEVER` if that is unknown."""
        if not self.grows:
            return replicas if self.share >= 1 else NEVER
        straight = self.used - self.squared
        if self.squared <= 0:
            return math.floor(replicas * self.most / straight)
        times = (math.sqrt(straight**2 + 4 * self.squared * self.most) - straight) / (2 * self.squared)
        return math.floor(replicas * times)


@dataclass
class Result:
    """Results of a simulated run, per measured version.

    Attributes:
        seconds: Seconds from one version to the next.
        fan_out_s: Seconds from the commit of a version until the last replica serves it or a newer one: median of the versions.
        staleness: Versions that a token lags behind, on average.
        busy: Share of the time in which a process was busy.
        cores: Load of processes if their work took no time: above 1 if a fleet asks for more than a process can do.
    """

    fleet: Fleet
    seconds: float
    fan_out_s: float
    push_s: float
    trajectories_per_s: float
    staleness: float
    messages: dict[str, float]
    sizes: dict[str, float]
    busy: dict[str, float]
    cores: dict[str, float]
    lag_s: dict[str, float]
    limits: list[Limit]
    started: int
    ended: int
    waiting: int
    served: list[int]
    newest: int
    events: int

    @property
    def first_limit(self) -> Limit:
        """Return the limit that the fewest replicas reach."""
        return min(self.limits, key=lambda each: each.reached_at(self.fleet.replicas))


class Simulation:
    """One fleet, one run."""

    def __init__(
        self,
        fleet: Fleet,
        work: Work,
        costs: Costs,
        network: Network,
        limits: Limits | None = None,
        *,
        seed: int = 0,
        endless: bool = False,
    ) -> None:
        drawing = random.Random(seed)  # noqa: S311 - a load, not a secret
        self._world = World(fleet, work, costs, network, limits or Limits(), drawing, endless)
        self._orchestrator = Orchestrator(self._world)
        self._weights = self._orchestrator.weights

    def run(self, versions: int, warm_up: int = 2, *, cores: Mapping[str, float] | None = None) -> Result:
        """Run until `versions` versions were made after the warm-up, and every replica has the last of them or a newer one.

        Args:
            versions: Versions that count.
            warm_up: Versions before them.
            cores: Load of processes if their work took no time; None: their load in this run.
        """
        orchestrator, weights, clock = self._orchestrator, self._weights, self._world.clock
        orchestrator.begin(versions + warm_up)
        clock.run(lambda: orchestrator.applied >= warm_up)
        begun, before = clock.now, self._totals()
        for _, process in self._processes():
            process.lag_s = 0.0
        clock.run(lambda: orchestrator.applied >= warm_up + versions)
        elapsed, after = clock.now - begun, self._totals()
        started, ended, running = orchestrator.started, orchestrator.ended, len(orchestrator.running)
        clock.run(lambda: weights.everyone_has(warm_up + versions))
        spent = {name: (after[name] - before[name]) / elapsed for name in after if name.startswith("busy ")}
        busy = {name.removeprefix("busy "): share for name, share in spent.items()}
        for name, process in self._processes():
            busy[name] += process.background
        seconds = elapsed / versions
        counts = {name: (after[name] - before.get(name, 0.0)) / versions for name in after}
        messages, sizes = _named(counts, "messages "), _named(counts, "bytes ")
        for name, (times, count, size) in weights.regular(seconds).items():
            messages[name], sizes[name] = times * count, times * size
        measured = range(warm_up + 1, warm_up + versions + 1)
        fan_out = sorted(weights.served_at[each] - weights.committed_at[each] for each in measured)
        return Result(
            fleet=self._world.fleet,
            seconds=seconds,
            fan_out_s=fan_out[len(fan_out) // 2],
            push_s=weights.push_s,
            trajectories_per_s=self._world.work.batch_of(self._world.fleet) * self._world.work.group / seconds,
            staleness=orchestrator.staleness(measured),
            messages=messages,
            sizes=sizes,
            busy=busy,
            cores=dict(cores or busy),
            lag_s={name: process.lag_s for name, process in self._processes()},
            limits=self._used(cores or busy, seconds, max(fan_out)),
            started=started,
            ended=ended,
            waiting=running,
            served=[each.version for each in weights.hosts for _ in each.replicas],
            newest=warm_up + versions,
            events=clock.events,
        )

    def _processes(self) -> Iterator[tuple[str, Process]]:
        yield "orchestrator", self._orchestrator.process
        yield "weightsync", self._weights.root.process
        if self._weights.relays:
            yield "busiest relay", max((each.process for each in self._weights.relays), key=lambda each: each.busy_s)

    def _totals(self) -> dict[str, float]:
        polls = self._orchestrator.polls
        return {
            "messages polls": 2.0 * polls,
            "bytes polls": polls * self._world.costs.orchestrator.poll_bytes,
            **{f"busy {name}": process.busy_s for name, process in self._processes()},
            **{f"messages {name}": float(count) for name, count in self._world.traffic.messages.items()},
            **{f"bytes {name}": float(count) for name, count in self._world.traffic.sizes.items()},
        }

    def _used(self, cores: Mapping[str, float], seconds: float, slowest_s: float) -> list[Limit]:
        """Return how far each limit is used."""
        limits, fleet, weights = self._world.limits, self._world.fleet, self._weights
        replicas = fleet.replicas
        sources = [weights.root, *weights.relays]
        watchers = max(each.watchers for each in sources)
        asking = replicas if fleet.relays else 0
        streams = min(PullLimits().streams, self._world.work.trainer_ranks)
        waits_s = self._orchestrator.process.lag_s + 2 * self._world.network.latency_s
        setting = partial(Limit, is_setting=True)
        # In a tree, the work of one source does not grow with the fleet.
        of_source = partial(setting, grows=not (fleet.relays and fleet.fan_out))
        found = [
            of_source("weightsync.max_watchers", watchers, limits.max_watchers, "a tree of relays, or the setting"),
            of_source("server.max_waiting_rpcs", watchers, limits.max_waiting_rpcs, "a tree of relays, or the setting"),
            setting("weightsync.max_replicas", replicas + len(weights.relays), limits.max_replicas, "the setting"),
            setting(
                "server.max_connections of the weight service",
                max(weights.root.watchers, asking) + len(weights.root.children),
                limits.max_connections,
                "the setting, and the limit on open files",
            ),
            of_source(
                "server.max_concurrent_rpcs of the weight service",
                max(each.uplink.most for each in sources) * streams,
                limits.max_concurrent_rpcs,
                "a tree of relays, or the setting",
            ),
            setting("orchestrator.replicas.most_announced", replicas, limits.most_announced, "the setting"),
            setting("orchestrator.replicas.most_per_principal", replicas, limits.most_per_principal, "the setting"),
            setting(
                "reports that a relay keeps", weights.most_behind, limits.most_behind_relay, "more relays at the root"
            ),
            Limit(
                "the orchestrator's core",
                cores["orchestrator"],
                1.0,
                "a longer orchestrator.replicas.poll_s, longer requests, two runs",
            ),
            Limit(
                "the weight service's core",
                cores["weightsync"],
                1.0,
                "fewer relays, of which each replica gets a list every ten seconds",
                squared=weights.list_share,
            ),
            Limit("a relay's core", cores.get("busiest relay", 0.0), 1.0, "a smaller fan-out", grows=False),
            Limit(
                "the way of a version: it serves before the next one, or as many later as max_staleness allows",
                slowest_s,
                seconds * max(1, self._world.work.max_staleness),
                "faster links, another fan-out, max_staleness",
                grows=False,
            ),
        ]
        if cores["orchestrator"] < 1:  # else it falls further and further behind
            may_wait_s = limits.replicas.progress_s - limits.replicas.poll_s
            silence = "answers of replicas wait in line (orchestrator.replicas.progress_s)"
            found.append(Limit(silence, waits_s, may_wait_s, "a longer progress_s"))
        return [each for each in found if each.used > 0]


def _named(counts: dict[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in counts.items() if name.startswith(prefix)}


def simulate(
    fleet: Fleet, work: Work, costs: Costs, network: Network, limits: Limits | None = None, *, versions: int = 3
) -> Result:
    """Simulate a fleet, and return how far it uses each limit. For processes, that is their load if they were infinitely fast."""
    asked = Simulation(fleet, work, costs, network, limits, endless=True).run(versions)
    return Simulation(fleet, work, costs, network, limits).run(versions, cores=asked.busy)
