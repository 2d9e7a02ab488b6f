"""What `sluice bench scale` simulates: a fleet, its work, its network and its limits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.network import Clock, Traffic
from orchestrator_svc.config import FoundReplicasConfig
from sluice.config import ServerConfig
from weightsync.config import WeightSyncConfig
from weightsync.receive.sources import SourceLimits
from weightsync.relay import MOST_REPLICAS_BEHIND

EPOCH = 1
"""Epoch of all versions."""

_BYTES_PER_GBIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Network:
    """The links.

    Attributes:
        uplink_gbit: Most that a machine sends, in 10^9 bits per second. Its transfers share it evenly.
        latency_s: Seconds that a message travels.
    """

    uplink_gbit: float = 100.0
    latency_s: float = 0.0002

    @property
    def bytes_per_s(self) -> float:
        """Return the most bytes per second that a machine sends."""
        return self.uplink_gbit * _BYTES_PER_GBIT


@dataclass(frozen=True, slots=True)
class Fleet:
    """The machines, replicas and relays.

    Attributes:
        per_host: Replicas per machine; they share one staged copy.
        relays: Whether each machine has a relay.
        fan_out: Relays that take versions from the root or from one relay; 0: all from the root.
        list_relays: Whether replicas look for relays (`rollout.use_relays`).
    """

    replicas: int
    per_host: int = 8
    relays: bool = True
    fan_out: int = 4

    @property
    def hosts(self) -> int:
        """Return the number of machines with replicas."""
        return -(-self.replicas // self.per_host)

    def upstream(self, relay: int) -> int:
        """Return the relay from which another one takes versions; -1 for the root."""
        return -1 if not self.fan_out or relay < self.fan_out else relay // self.fan_out - 1


@dataclass(frozen=True, slots=True)
class Work:
    """What the fleet does.

    Attributes:
        group: Samples per group. A group is one request.
        groups_per_replica: Groups that a replica runs at a time.
        tokens: Tokens of a sample.
        generation_s: Mean seconds of a request.
        spread: Largest deviation of a request from that mean, as a fraction of the mean.
        train_s: Seconds of a step.
        max_staleness: Versions that a token may lag behind.
        weights_bytes: Bytes of the model's weights.
        delta_bytes: Bytes of a version after the first one.
        tensors: Tensors of the model.
        trainer_ranks: Processes of the trainer; each compares and sends its own shard.
        batch_groups: Groups of a batch; 0: as many as keep the fleet full at `max_staleness`.
        reports: Reports of a replica for a version: that it is staged, and that it serves. The former is left out if an engine takes
            it at once.
    """

    group: int = 16
    groups_per_replica: int = 1
    tokens: int = 1024
    generation_s: float = 60.0
    spread: float = 0.3
    train_s: float = 20.0
    max_staleness: int = 1
    weights_bytes: float = 15.2e9
    delta_bytes: float = 15.2e9 / 33
    tensors: int = 339
    trainer_ranks: int = 8
    batch_groups: int = 0
    reports: float = 2.0

    def batch_of(self, fleet: Fleet) -> int:
        """Return the groups of a batch."""
        return self.batch_groups or max(1, fleet.replicas * self.groups_per_replica // (self.max_staleness + 1))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the services as they are by default; see the settings of these names."""

    max_watchers: int = field(default_factory=lambda: WeightSyncConfig().max_watchers)
    max_replicas: int = field(default_factory=lambda: WeightSyncConfig().max_replicas)
    lease_s: float = field(default_factory=lambda: WeightSyncConfig().lease_s)
    heartbeat_s: float = field(default_factory=lambda: WeightSyncConfig().heartbeat_s)
    keep: int = field(default_factory=lambda: WeightSyncConfig().keep)
    max_connections: int = field(default_factory=lambda: ServerConfig(port=1).max_connections)
    max_concurrent_rpcs: int = field(default_factory=lambda: ServerConfig(port=1).max_concurrent_rpcs)
    max_waiting_rpcs: int = field(default_factory=lambda: ServerConfig(port=1).max_waiting_rpcs)
    most_announced: int = field(default_factory=lambda: FoundReplicasConfig().most_announced)
    most_per_principal: int = field(default_factory=lambda: FoundReplicasConfig().most_per_principal)
    most_behind_relay: int = MOST_REPLICAS_BEHIND
    replicas: FoundReplicasConfig = field(default_factory=FoundReplicasConfig)
    sources: SourceLimits = field(default_factory=SourceLimits)


@dataclass(frozen=True, slots=True)
class World:
    """The state that all parts of a simulation share.

    Attributes:
        drawing: Random numbers for the durations of requests.
        endless: Whether processes take no time for their work.
    """

    fleet: Fleet
    work: Work
    costs: Costs
    network: Network
    limits: Limits
    drawing: random.Random
    endless: bool
    clock: Clock = field(default_factory=Clock)
    traffic: Traffic = field(default_factory=Traffic)
