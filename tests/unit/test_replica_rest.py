"""How long a replica rests after failed requests."""

from __future__ import annotations

import grpc
import pytest
from simulated_clock import SimulatedClock

from sluice.config import SecurityConfig
from sluice.rpc import SluiceError
from sluice.sampling.concurrency import ConcurrencyLimit
from sluice.sampling.config import ConcurrencyConfig, ReplicasConfig
from sluice.sampling.progress import ListeningClock
from sluice.sampling.replica import Replica
from sluice.versions import BASE

FAILURE = SluiceError(grpc.StatusCode.INTERNAL, "ENGINE_FAILED", "the engine restarts")


async def test_requests_that_fail_together_count_once_and_many_in_a_row_overflow_nothing() -> None:
    clock = SimulatedClock()
    limit = ConcurrencyLimit(ConcurrencyConfig(), 8)
    listening = ListeningClock(0.1, clock())
    replica = Replica("127.0.0.1:9", SecurityConfig(), ReplicasConfig(), limit, listening, clock=clock)
    replica.seen = True
    replica.status.state = 2
    for _ in range(50):
        replica.work_failed(FAILURE)
    assert "failed lately" in replica.why_not()
    clock.now += 0.25
    assert not replica.why_not(), "fifty calls of one failure are one failure"
    for _ in range(3000):
        replica.work_failed(FAILURE)
        clock.now += 10.5
        assert not replica.why_not()
    replica.work_succeeded(BASE)
    await replica.close()


@pytest.mark.parametrize(("adapt", "places"), [(True, 40), (False, 16)])
async def test_its_load_counts_by_its_own_limit(adapt: bool, places: int) -> None:
    """Replicas with the same number of places may be able to take very different numbers of samples."""
    limit = ConcurrencyLimit(ConcurrencyConfig(adapt=adapt, initial_samples=40), 8)
    replica = Replica("127.0.0.1:9", SecurityConfig(), ReplicasConfig(), limit, ListeningClock(0.1, 0.0))
    replica.status.max_running, replica.in_flight = 16, 8
    assert replica.load.share == 8 / places
    await replica.close()
