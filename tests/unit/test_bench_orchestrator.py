"""What `sluice bench orchestrator` computes from what it reads, and how late an event loop says that it is."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from simulated_clock import SimulatedClock

from benchmarks.loop_lag import lag_ms, quantile
from benchmarks.orchestrator import Level, Measured, table
from sluice.telemetry import LoopLag


def test_a_quantile_lies_within_its_bucket() -> None:
    cumulative = {0.01: 50.0, 0.02: 100.0, float("inf"): 100.0}
    assert quantile(cumulative, 0.25) == pytest.approx(0.005)
    assert quantile(cumulative, 0.5) == pytest.approx(0.01)
    assert quantile(cumulative, 0.99) == pytest.approx(0.0198)


def test_a_quantile_beyond_the_last_bucket_is_its_edge() -> None:
    assert quantile({1.0: 10.0, 5.0: 10.0, float("inf"): 100.0}, 0.9) == 5.0


def test_the_longest_lag_is_the_end_of_its_bucket_however_seldom_it_was() -> None:
    before = {0.001: 5.0, 0.5: 5.0, 1.0: 5.0, float("inf"): 6.0}
    after = {0.001: 1005.0, 0.5: 1005.0, 1.0: 1006.0, float("inf"): 1007.0}
    assert lag_ms(before, after) == {"p50": 0.5, "p99": 1.0, "max": 1000.0}
    assert lag_ms({}, after)["max"] == 1000.0, "beyond the last edge"


def test_the_latency_is_what_keeps_so_many_in_flight() -> None:
    assert Level("", in_flight=10_000, episodes_per_s=1_000).latency_s == pytest.approx(11.0), "with some room"
    assert Level("", in_flight=10_000, episodes_per_s=1_000, turns=4).latency_s == pytest.approx(2.75)


def test_a_loop_that_stands_still_has_missed_all_the_looks_in_between() -> None:
    lag = asyncio.run(_lag_of_a_loop_that_stands_still_for(0.2))
    assert lag == pytest.approx(0.15), "the look that was due after 0.05 s"


async def _lag_of_a_loop_that_stands_still_for(seconds: float) -> float:
    clock = SimulatedClock()
    lag = LoopLag(clock)
    looking = asyncio.create_task(lag.run())
    await clock.advance(0.0)  # it waits for its first look
    clock.now += seconds
    await clock.advance(0.0)
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
    return lag.take_p99_s()


def test_the_levels_are_printed_as_the_table_of_the_page() -> None:
    held = Measured(1000.4, 10_990, 0.98, 296.2, 1.0, 3.0, 9.4, 20.0, {"orchestrator": 0.331}, {"orchestrator": 0.5})
    header, line, row = table({"held": held}).splitlines()
    assert header.count("|") == line.count("|") == row.count("|") == 8
    assert row == "| held | 10,990 | 1,000 | 0.33 | 0.50 | 296 MiB | 9 ms |"
