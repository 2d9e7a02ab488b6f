"""The restart policy under a simulated clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.supervise.restart_policy import EXIT_MISSING_PEER, MAX_DELAY_S, WINDOW_S, GiveUp, StartAgain, after_exit

KILLED = -9


def test_a_child_that_served_is_started_again_at_once_however_often() -> None:
    earlier = [0.0, 1.0]
    assert [after_exit(KILLED, 2.0, earlier[:count], 3, was_ready=True) for count in (0, 1, 2)] == [
        StartAgain(0.0, 1),
        StartAgain(0.0, 2),
        StartAgain(0.0, 3),
    ]


def test_the_pause_grows_while_a_child_does_not_serve_for_long() -> None:
    pauses = [after_exit(KILLED, 2.0, [], 3, was_ready=True, fruitless=count) for count in (0, 1, 2, 3, 4, 99)]
    assert pauses == [StartAgain(pause, 1) for pause in (0.0, 0.0, 0.5, 1.0, 2.0, MAX_DELAY_S)]


def test_no_restart_beyond_the_bound() -> None:
    decision = after_exit(KILLED, 2.0, [0.0, 1.0], 2, was_ready=True)
    assert isinstance(decision, GiveUp)
    assert "2 times" in decision.reason


def test_restarts_outside_the_window_do_not_count() -> None:
    assert after_exit(KILLED, WINDOW_S + 1, [0.0], 1, was_ready=True) == StartAgain(0.0, 1)


def test_a_child_with_wrong_settings_is_not_restarted() -> None:
    assert after_exit(2, 0.0, [], 3, was_ready=False) == GiveUp("its settings are wrong")


def test_a_child_whose_port_is_taken_is_not_restarted_at_the_same_one() -> None:
    assert after_exit(4, 0.0, [], 3, was_ready=False) == GiveUp("it cannot listen at its address")


@pytest.mark.parametrize("code", [2, 4])
def test_settings_that_served_before_are_not_what_is_wrong(code: int) -> None:
    # Such as a port that another program took while the child was dead.
    assert isinstance(after_exit(code, 0.0, [], 3, was_ready=True), StartAgain)
    assert isinstance(after_exit(code, 9.0, [0.0, 1.0, 3.0], 3, was_ready=True), GiveUp)


def test_a_child_that_gave_up_is_not_restarted() -> None:
    assert after_exit(3, 0.0, [], 3, was_ready=True) == GiveUp("it gave up")


@pytest.mark.parametrize("code", [1, 5, 127])
def test_a_child_that_failed_before_it_served_is_not_restarted(code: int) -> None:
    assert isinstance(after_exit(code, 0.0, [], 3, was_ready=False), GiveUp)


def test_a_child_killed_while_starting_is_restarted() -> None:
    assert isinstance(after_exit(KILLED, 0.0, [], 3, was_ready=False), StartAgain)


def test_a_service_that_ends_by_itself_is_restarted() -> None:
    assert isinstance(after_exit(0, 0.0, [], 3, was_ready=True), StartAgain)


@given(st.lists(st.floats(0, 200), max_size=60), st.integers(0, 5), st.integers(0, 99))
def test_no_window_ever_holds_more_restarts_than_allowed(gaps: list[float], allowed: int, fruitless: int) -> None:
    now, restarts = 0.0, []
    for gap in gaps:
        now += gap
        decision = after_exit(KILLED, now, restarts, allowed, was_ready=True, fruitless=fruitless)
        if isinstance(decision, StartAgain):
            restarts.append(now)
            assert (0 < decision.delay_s <= MAX_DELAY_S) == (fruitless > 1)
    assert all(sum(at - WINDOW_S <= other <= at for other in restarts) <= allowed for at in restarts)


def test_a_service_whose_peer_never_came_is_started_again_to_wait_anew() -> None:
    assert isinstance(after_exit(EXIT_MISSING_PEER, 0.0, [], 3, was_ready=False), StartAgain)
    assert isinstance(after_exit(EXIT_MISSING_PEER, 9.0, [0.0, 1.0, 3.0], 3, was_ready=True), GiveUp)
