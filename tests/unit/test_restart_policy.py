"""The restart policy under a simulated clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.supervise.restart_policy import GiveUp, RestartLimits, RestartPolicy, StartAgain

KILLED = -9


def test_a_child_that_served_is_started_again_after_a_growing_pause() -> None:
    policy = RestartPolicy(RestartLimits(restarts=3, first_delay_s=0.5))
    assert [policy.on_exit(KILLED, now, was_ready=True) for now in (0.0, 1.0, 2.0)] == [
        StartAgain(0.5, 1),
        StartAgain(1.0, 2),
        StartAgain(2.0, 3),
    ]


def test_no_restart_beyond_the_bound() -> None:
    policy = RestartPolicy(RestartLimits(restarts=2))
    policy.on_exit(KILLED, 0.0, was_ready=True)
    policy.on_exit(KILLED, 1.0, was_ready=True)
    decision = policy.on_exit(KILLED, 2.0, was_ready=True)
    assert isinstance(decision, GiveUp)
    assert "2 times" in decision.reason


def test_restarts_outside_the_window_do_not_count() -> None:
    policy = RestartPolicy(RestartLimits(restarts=1, window_s=600.0))
    assert isinstance(policy.on_exit(KILLED, 0.0, was_ready=True), StartAgain)
    assert policy.on_exit(KILLED, 601.0, was_ready=True) == StartAgain(0.5, 1)


def test_a_child_with_wrong_settings_is_not_restarted() -> None:
    decision = RestartPolicy(RestartLimits()).on_exit(2, 0.0, was_ready=True)
    assert decision == GiveUp("its settings are wrong")


def test_a_child_that_gave_up_is_not_restarted() -> None:
    decision = RestartPolicy(RestartLimits()).on_exit(3, 0.0, was_ready=True)
    assert decision == GiveUp("it gave up")


@pytest.mark.parametrize("code", [1, 4, 127])
def test_a_child_that_failed_before_it_served_is_not_restarted(code: int) -> None:
    assert isinstance(RestartPolicy(RestartLimits()).on_exit(code, 0.0, was_ready=False), GiveUp)


def test_a_child_killed_while_starting_is_restarted() -> None:
    assert isinstance(RestartPolicy(RestartLimits()).on_exit(-9, 0.0, was_ready=False), StartAgain)


def test_a_service_that_ends_by_itself_is_restarted() -> None:
    assert isinstance(RestartPolicy(RestartLimits()).on_exit(0, 0.0, was_ready=True), StartAgain)


@given(st.lists(st.floats(0, 100), max_size=60), st.integers(0, 5))
def test_no_window_ever_holds_more_restarts_than_allowed(gaps: list[float], allowed: int) -> None:
    limits = RestartLimits(restarts=allowed, window_s=300.0)
    policy = RestartPolicy(limits)
    now, restarts = 0.0, []
    for gap in gaps:
        now += gap
        decision = policy.on_exit(KILLED, now, was_ready=True)
        if isinstance(decision, StartAgain):
            restarts.append(now)
            assert 0 < decision.delay_s <= limits.max_delay_s
    assert all(sum(at - limits.window_s <= other <= at for other in restarts) <= allowed for at in restarts)
