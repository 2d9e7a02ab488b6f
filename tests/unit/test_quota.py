"""Quotas, with a simulated clock."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.rpc import SluiceError
from sluice.rpc.principals import Principal, Quota
from sluice.rpc.quota import Usage


def usage(now: float = 0.0, **quota: float) -> Usage:
    return Usage(Principal("p", "agent", Quota(**quota)), now)


def retry_after(used: Usage, now: float) -> float:
    with pytest.raises(SluiceError) as caught:
        used.begin(now)
    assert caught.value.code.name == "RESOURCE_EXHAUSTED"
    assert "'p'" in caught.value.message
    return caught.value.retry_after_s


def test_without_a_quota_nothing_is_refused():
    used = usage()
    for _ in range(10_000):
        used.begin(0.0)


def test_a_burst_passes_at_once_and_then_the_rate_holds():
    used = usage(requests_per_s=2, burst=3)
    for _ in range(3):
        used.begin(0.0)
    assert retry_after(used, 0.0) == pytest.approx(0.5)
    assert retry_after(used, 0.2) == pytest.approx(0.3)
    used.begin(0.5)
    assert retry_after(used, 0.5) == pytest.approx(0.5)


def test_the_burst_is_one_second_of_calls_unless_set():
    used = usage(requests_per_s=2.5)
    for _ in range(3):
        used.begin(0.0)
    retry_after(used, 0.0)
    slow = usage(requests_per_s=0.1)
    slow.begin(0.0)
    assert retry_after(slow, 0.0) == pytest.approx(10)


def test_calls_in_progress_are_counted_until_they_end():
    used = usage(in_flight=2)
    used.begin(0.0)
    used.begin(0.0)
    assert retry_after(used, 100.0) > 0
    used.end()
    used.begin(100.0)
    assert used.in_flight == 2


def test_a_refused_call_counts_as_nothing():
    used = usage(requests_per_s=1, burst=1, in_flight=5)
    used.begin(0.0)
    for _ in range(100):
        retry_after(used, 0.5)
    assert used.in_flight == 1
    used.begin(1.0)


@given(st.floats(0.1, 100), st.integers(1, 20), st.lists(st.floats(-1, 2), min_size=1, max_size=200))
def test_no_window_has_more_calls_than_rate_and_burst_allow(rate, burst, steps):
    used, now, admitted = usage(requests_per_s=rate, burst=burst), 0.0, []
    latest = 0.0
    for step in steps:
        now += step  # also backwards, which must bring nothing
        latest = max(latest, now)
        with contextlib.suppress(SluiceError):
            used.begin(now)
            admitted.append(latest)
    for begin in range(len(admitted)):
        for end in range(begin, len(admitted)):
            allowed = burst + (admitted[end] - admitted[begin]) * rate
            assert end - begin + 1 <= allowed + 1e-6


@given(st.floats(0.1, 100), st.integers(1, 5))
def test_a_call_after_the_delay_is_admitted(rate, burst):
    used = usage(requests_per_s=rate, burst=burst)
    for _ in range(burst):
        used.begin(0.0)
    delay = retry_after(used, 0.0)
    assert 0 < delay <= 1 / rate
    used.begin(delay + 1e-9)
