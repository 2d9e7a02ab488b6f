"""What the orchestrator tells of the replicas' weight updates."""

from __future__ import annotations

from datetime import timedelta

import pytest

from sluice.config import SecurityConfig
from sluice.sampling.concurrency import ConcurrencyLimit
from sluice.sampling.config import ConcurrencyConfig, ReplicasConfig
from sluice.sampling.pool import ReplicaPool
from sluice.sampling.progress import ListeningClock
from sluice.sampling.replica import Replica
from sluice.v1 import rollout_pb2
from sluice.versions import Version


def replica(number: int, pause_s: float | None) -> Replica:
    limit, clock = ConcurrencyLimit(ConcurrencyConfig(), 1), ListeningClock(0.1, 0.0)
    answered = Replica(f"127.0.0.1:{number}", SecurityConfig(), ReplicasConfig(), limit, clock)
    answered.seen, answered.version = True, Version(1, number)
    answered.status.state = rollout_pb2.REPLICA_STATE_SERVING
    if pause_s is not None:
        answered.status.last_update.pause.FromTimedelta(timedelta(seconds=pause_s))
    return answered


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([], {}),
        ([(5, None)], {}),
        ([(5, 0.25), (7, 0.5)], {"weights/replica_lag": 2.0, "weights/pause_s": 0.5}),
        ([(8, 0.25)], {"weights/replica_lag": 0.0, "weights/pause_s": 0.25}),  # the trainer's reply came after its push
    ],
)
async def test_the_slowest_and_the_last_replica_are_told(replicas, expected) -> None:
    pool = ReplicaPool([], SecurityConfig(), ReplicasConfig(), lambda _: None)
    known = [replica(*each) for each in replicas]
    pool._replicas = {each.target: each for each in known}
    metrics = pool.update_metrics(Version(1, 7))
    assert {name: metrics[name] for name in expected} == expected
    assert bool(metrics) == bool(expected)
    for each in known:
        await each.close()
