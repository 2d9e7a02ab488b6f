"""The weight service of a simulated fleet, its relays, and the replicas that take versions from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fleet.costs import MIB
from benchmarks.fleet.fleet import EPOCH, World
from benchmarks.fleet.network import Process, Uplink
from sluice.versions import Version
from weightsync.receive.sources import ROOT, Candidate, choose, renewal_s
from weightsync.service.chain import Form, Forms, find_path
from weightsync.service.ledger import Ledger

_REPORTS_STAGED = 1.5
"""From so many reports per version on, replicas report that it is staged before they report that it serves."""

_BEAT_BYTES = 2.0
"""Bytes of an empty heartbeat to a watcher."""


@dataclass
class Source:
    """The weight service (`relay` -1), or a relay of one machine."""

    relay: int
    process: Process
    uplink: Uplink
    children: list[int] = field(default_factory=list)
    """Relays that take versions from this source."""
    hosts: list[int] = field(default_factory=list)
    watchers: int = 0
    version: int = 0
    fetching: bool = False
    announced: int = 0
    waiting: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """Reports to forward: the last one of each replica or relay."""
    forwarding: bool = False


@dataclass
class Host:
    """A machine with replicas, which share one staged copy."""

    source: Source
    replicas: range
    version: int = 0
    pulling: bool = False
    announced: int = 0


class Weights:
    """The weight service, its relays, and the replicas that take versions.

    Args:
        world: The state of the simulation.
        on_serve: Called with each replica that serves another version.
    """

    def __init__(self, world: World, on_serve: Callable[[int], None]) -> None:
        self._world, self._clock, self._costs, self._work = world, world.clock, world.costs.weights, world.work
        self._on_serve = on_serve
        fleet, network = world.fleet, world.network
        self._mib = self._work.delta_bytes / MIB
        # A service sends with one core, which limits its rate whatever the link can do.
        cpu_bytes_per_s = MIB / self._costs.give_out_cpu_s.each if self._costs.give_out_cpu_s.each else math.inf
        one = MIB / self._costs.pull_s.each if self._costs.pull_s.each else math.inf

        def source(relay: int) -> Source:
            return Source(
                relay,
                Process(endless=world.endless),
                Uplink(world.clock, min(network.bytes_per_s, cpu_bytes_per_s), one),
            )

        self.root = source(-1)
        self.relays = [source(each) for each in range(fleet.hosts)] if fleet.relays else []
        for each in self.relays:
            above = self._above(each)
            above.children.append(each.relay)
            above.watchers += 1
        self.hosts: list[Host] = []
        for number in range(fleet.hosts):
            replicas = range(number * fleet.per_host, min(fleet.replicas, (number + 1) * fleet.per_host))
            host = Host(self._chosen(number, replicas), replicas)
            host.source.hosts.append(number)
            host.source.watchers += len(replicas)
            self.hosts.append(host)
        self.ledger = Ledger(world.limits.keep)
        dense = int(self._work.weights_bytes)
        self.ledger.commit(Version(EPOCH, 0), Forms("0", dense_bytes=dense, copy_bytes=dense))
        self.committed_at: dict[int, float] = {}
        self.served_at: dict[int, float] = {}
        self._left: dict[int, int] = {}
        self._history: list[list[tuple[float, int]]] = [[(0.0, 0)] for _ in self.hosts]
        ranks = self._work.trainer_ranks
        self.encode_s = self._costs.encode_s.of(self._work.weights_bytes / MIB / ranks)
        self.push_s = self._costs.push_s.of(self._mib / ranks) + self._work.delta_bytes / network.bytes_per_s
        self._manifest_bytes = self._costs.manifest_bytes.of(self._work.tensors)
        for rate, size, cpu_s in self._rates().values():
            self.root.process.background += rate * cpu_s
            self.root.uplink.rate *= max(0.05, 1 - rate * size / network.bytes_per_s)

    def _above(self, source: Source) -> Source:
        upstream = self._world.fleet.upstream(source.relay)
        return self.root if upstream < 0 else self.relays[upstream]

    def _chosen(self, host: int, replicas: range) -> Source:
        """Return the source that the replicas of a host choose with `choose` from the root and the relays that they ask."""
        probes = self._world.limits.sources.probes
        asked = [host, *(each for each in range(probes) if each != host)][:probes] if self.relays else []
        candidates = [Candidate(ROOT, "root", len(self.relays), None, 0.001)]
        candidates += [
            Candidate(str(each), f"host-{each}", 0, None, 0.001) for each in asked if each < len(self.relays)
        ]
        chosen = {
            choose(candidates, None, host=f"host-{host}", replica=f"replica-{each}", draw=0.5) for each in replicas
        }
        (only,) = chosen
        return self.root if only == ROOT else self.relays[int(only)]

    @property
    def list_share(self) -> float:
        """Return the share of the root's time that it takes to list relays as sources."""
        looks = self._world.fleet.replicas / self._world.limits.sources.look_s if self.relays else 0.0
        return looks * self._costs.list_s.each * len(self.relays)

    @property
    def most_behind(self) -> int:
        """Return the most replicas and relays whose reports one relay forwards."""
        below = [0] * len(self.relays)
        for number in range(len(self.relays) - 1, -1, -1):
            below[number] += 1 + sum(len(self.hosts[each].replicas) for each in self.relays[number].hosts)
            if (above := self._world.fleet.upstream(number)) >= 0:
                below[above] += below[number]
        return max(below, default=0)

    def _rates(self) -> dict[str, tuple[float, float, float]]:
        """Return the root's regular answers while nothing happens: answers per second, and bytes and CPU seconds of each."""
        limits, fleet, costs = self._world.limits, self._world.fleet, self._costs
        relays = len(self.relays)
        return {
            "lists": (
                fleet.replicas / limits.sources.look_s if relays else 0.0,
                costs.list_bytes.of(relays),
                costs.list_s.of(relays),
            ),
            "renewals": ((fleet.replicas + relays) / renewal_s(limits.lease_s), costs.report_bytes, costs.report_s),
            "heartbeats": (self.root.watchers / limits.heartbeat_s, _BEAT_BYTES, costs.watch_s),
        }

    def regular(self, seconds: float) -> dict[str, tuple[float, int, float]]:
        """Return the regular messages from one version to the next: how often, and in how many messages and bytes each time.

        A report restarts the time until the next renewal; an announcement restarts the time until the next heartbeat.
        """
        limits, replicas, costs = self._world.limits, self._world.fleet.replicas, self._costs
        relays = len(self.relays)
        renewals, beats = int(seconds / renewal_s(limits.lease_s)), int(seconds / limits.heartbeat_s)
        looks = replicas * seconds / limits.sources.look_s if relays else 0.0
        asked = min(limits.sources.probes, relays)
        watchers = sum(each.watchers for each in self.relays)
        return {
            "lists": (looks, 2, costs.list_bytes.of(relays)),
            "lists of relays": (looks * asked, 2, costs.list_bytes.of(0)),
            "renewals": ((replicas + relays) * renewals, 2, costs.report_bytes),
            "renewals of relays": (replicas * renewals if relays else 0, 2, costs.report_bytes),
            "heartbeats": (self.root.watchers * beats, 1, _BEAT_BYTES),
            "heartbeats of relays": (watchers * beats, 1, _BEAT_BYTES),
        }

    # Queries.

    def version_of(self, replica: int) -> int:
        """Return the version that a replica serves."""
        return self.hosts[replica // self._world.fleet.per_host].version

    def served_between(self, replica: int, since: float, until: float) -> list[tuple[int, float]]:
        """Return the versions that a replica served between two times, with the seconds of each."""
        history = self._history[replica // self._world.fleet.per_host]
        pieces = []
        for place in range(len(history) - 1, -1, -1):
            begun, version = history[place]
            if until > begun:
                pieces.append((version, until - max(begun, since)))
            until = min(until, begun)
            if begun <= since:
                break
        return pieces[::-1]

    def everyone_has(self, version: int) -> bool:
        """Return whether every replica serves a version or a newer one."""
        return version in self.served_at

    # Sending a version.

    def push(self, number: int) -> None:
        """Push a version from the trainer."""
        self._clock.at(self._clock.now + self.push_s, self._commit_at_root, number)

    def _commit_at_root(self, number: int) -> None:
        forms = Forms(
            f"{number}",
            delta_bytes=int(self._work.delta_bytes),
            base=Version(EPOCH, number - 1),
            copy_bytes=int(self._work.weights_bytes),
        )
        self.ledger.commit(Version(EPOCH, number), forms)
        for version in self.ledger.surplus(self._clock.now):
            self.ledger.delete(version, self._clock.now)
        self.committed_at[number], self._left[number] = self._clock.now, len(self.hosts)
        self.root.process.busy_s += self._costs.take_in_cpu_s.of(self._mib)  # this time is a part of the push
        self.root.version = number
        self._announce(self.root)

    def _announce(self, source: Source) -> None:
        """Announce a version to the watchers: relays, and the replicas of hosts."""
        latency_s = self._world.network.latency_s
        for relay in source.children:
            self._tell(source, 1)
            told = source.process.do(self._clock.now, self._costs.watch_s) + latency_s
            self._clock.at(told, self._relay_hears, self.relays[relay], source.version)
        for host in source.hosts:
            watchers = len(self.hosts[host].replicas)
            self._tell(source, watchers)
            told = source.process.do(self._clock.now, self._costs.watch_s * watchers) + latency_s
            self._clock.at(told, self._host_hears, self.hosts[host], source.version)

    def _tell(self, source: Source, watchers: int) -> None:
        at = "" if source is self.root else " of relays"
        self._world.traffic.add(f"announcements{at}", watchers, watchers * self._manifest_bytes)

    def _size(self, held: int, target: int) -> float:
        """Return the bytes to get from a held version to another one, according to the root's ledger."""
        path = find_path(self.ledger.committed, Version(EPOCH, target), Version(EPOCH, held))
        if path is None:
            return self._work.weights_bytes
        return sum(self._work.weights_bytes if form is Form.DENSE else self._work.delta_bytes for _, form in path)

    def _relay_hears(self, relay: Source, number: int) -> None:
        relay.announced = max(relay.announced, number)
        self._fetch(relay)

    def _fetch(self, relay: Source) -> None:
        if relay.fetching or relay.announced <= relay.version:
            return
        relay.fetching = True
        target, above = relay.announced, self._above(relay)
        self._report(relay, f"relay:{relay.relay}", target, serving=False)
        self._transfer(above, self._size(relay.version, target), self._fetched, relay, target)

    def _transfer(self, source: Source, size: float, done: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        at = "" if source is self.root else " of relays"
        self._world.traffic.add(f"pulls{at}", 1 + math.ceil(size / MIB), size)
        source.process.busy_s += self._costs.give_out_cpu_s.of(size / MIB)
        if source is not self.root and done == self._stage:  # the relay of the same machine: no link is used
            self._clock.at(self._clock.now + self._costs.pull_s.each * size / MIB, done, *arguments)
        else:
            source.uplink.send(size, done, *arguments)

    def _fetched(self, relay: Source, target: int) -> None:
        """A relay has a version's bytes; it commits them."""
        relay.process.busy_s += self._costs.take_in_cpu_s.of(self._mib)
        # The cost of a relay by MiB includes the transfer, whose time has already passed.
        by_mib = max(0.0, self._costs.hop_s.each - self._costs.pull_s.each)
        committed = self._clock.now + self._costs.hop_s.fixed + by_mib * self._mib
        self._clock.at(committed, self._relayed, relay, target)

    def _relayed(self, relay: Source, target: int) -> None:
        relay.fetching, relay.version = False, target
        self._report(relay, f"relay:{relay.relay}", target, serving=True)
        self._announce(relay)
        self._fetch(relay)

    def _host_hears(self, host: Host, number: int) -> None:
        host.announced = max(host.announced, number)
        self._pull(host)

    def _pull(self, host: Host) -> None:
        if host.pulling or host.announced <= host.version:
            return
        host.pulling = True
        target = host.announced
        self._transfer(host.source, self._size(host.version, target), self._stage, host, target)

    def _stage(self, host: Host, target: int) -> None:
        for replica in host.replicas:
            self._report_replica(host, replica, target, serving=False)
        staged_s = self._costs.pull_s.fixed + self._costs.stage_s.of(self._work.weights_bytes / MIB)
        staged_s += self._costs.share_s if len(host.replicas) > 1 else 0.0
        self._clock.at(self._clock.now + staged_s, self._serve, host, target)

    def _serve(self, host: Host, target: int) -> None:
        before, host.version, host.pulling = host.version, target, False
        self._history[host.replicas.start // self._world.fleet.per_host].append((self._clock.now, target))
        for replica in host.replicas:
            self._report_replica(host, replica, target, serving=True)
            self._on_serve(replica)
        for number in range(before + 1, target + 1):
            self._left[number] -= 1
            if not self._left[number]:
                self.served_at[number] = self._clock.now
        self._pull(host)

    # Reports.

    def _report_replica(self, host: Host, replica: int, version: int, *, serving: bool) -> None:
        if not serving and self._work.reports < _REPORTS_STAGED:
            return
        arrives = self._clock.now + self._world.network.latency_s
        self._clock.at(arrives, self._reported, host.source, f"replica-{replica}", version, serving)

    def _report(self, relay: Source, name: str, version: int, *, serving: bool) -> None:
        relay.waiting.pop(name, None)
        relay.waiting[name] = (version, serving)
        if not relay.forwarding:
            self._forward(relay)

    def _reported(self, source: Source, name: str, version: int, serving: bool) -> None:
        source.process.do(self._clock.now, self._costs.report_s)
        if source is not self.root:
            self._world.traffic.add("reports of relays", 2, self._costs.report_bytes)
            self._report(source, name, version, serving=serving)
            return
        self._world.traffic.add("reports", 2, self._costs.report_bytes)
        number = Version(EPOCH, version)
        self.ledger.report(
            name,
            serving=number if serving else None,
            staged=None if serving else number,
            error="",
            now=self._clock.now,
            lease_s=self._world.limits.lease_s,
        )

    def _forward(self, relay: Source) -> None:
        """Send the oldest waiting report. The next one follows when it is answered."""
        if not relay.waiting:
            relay.forwarding = False
            return
        relay.forwarding = True
        name = next(iter(relay.waiting))
        version, serving = relay.waiting.pop(name)
        self._clock.at(self._clock.now + self._world.network.latency_s, self._forwarded, relay, name, version, serving)

    def _forwarded(self, relay: Source, name: str, version: int, serving: bool) -> None:
        above = self._above(relay)
        self._reported(above, name, version, serving)
        answered = max(self._clock.now, above.process.free_at) + self._world.network.latency_s
        self._clock.at(answered, self._forward, relay)
