"""The order of operations: pure state machines under every sequence of arrivals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_svc.tuner.order import MOST_AHEAD, OUTCOMES_KEPT, Refusal, RefusedError, Training, Turns


@given(st.permutations(range(1, 21)), st.lists(st.booleans(), min_size=40, max_size=40))
def test_operations_run_once_each_in_the_order_of_their_numbers(arrivals, runs) -> None:
    training, ran = Training[int, str](), []

    def run_next() -> None:
        entry, number = training.begin()
        ran.append(number)
        training.end(entry, f"outcome of {number}")

    for index, number in enumerate(arrivals):
        training.submit(number, f"digest {number}", number)
        training.submit(number, f"digest {number}", number)  # a repeat is the same operation
        while training.ready and runs[index]:
            run_next()
    while training.ready:
        run_next()
    assert ran == list(range(1, 21))
    assert all(training.find(number).outcome == f"outcome of {number}" for number in ran)


def test_another_operation_with_a_known_number_is_refused() -> None:
    training = Training[str, str]()
    training.submit(1, "a", "first")
    with pytest.raises(RefusedError) as refused:
        training.submit(1, "b", "other")
    assert refused.value.refusal is Refusal.OTHER_OPERATION


def test_numbers_too_far_ahead_and_outcomes_of_long_ago_are_refused() -> None:
    training = Training[int, int]()
    with pytest.raises(RefusedError) as ahead:
        training.submit(1 + MOST_AHEAD, "x", 0)
    assert (ahead.value.refusal, ahead.value.next_sequence_no) == (Refusal.TOO_FAR_AHEAD, 1)
    for number in range(1, OUTCOMES_KEPT + 3):
        training.submit(number, "x", number)
        entry, _ = training.begin()
        training.end(entry, number)
    assert training.find(3).outcome == 3
    for ask in (lambda: training.find(2), lambda: training.submit(2, "x", 2)):
        with pytest.raises(RefusedError) as forgotten:
            ask()
        assert forgotten.value.refusal is Refusal.FORGOTTEN
    with pytest.raises(RefusedError) as unknown:
        training.find(OUTCOMES_KEPT + 3)
    assert unknown.value.refusal is Refusal.UNKNOWN


@given(st.lists(st.sets(st.sampled_from("abcd")), max_size=60))
def test_nobody_who_is_ready_waits_while_another_has_two_turns(ready_sets) -> None:
    turns = Turns()
    for name in "abcd":
        turns.add(name)
    passed = dict.fromkeys("abcd", 0)
    for ready in ready_sets:
        taken = turns.take(ready)
        assert (taken in ready) if ready else taken is None
        for name in "abcd":
            passed[name] = passed[name] + 1 if name in ready and name != taken else 0
            assert passed[name] < 4, f"{name} was ready for four turns of others"


def test_a_removed_training_gets_no_turn() -> None:
    turns = Turns()
    turns.add("a")
    turns.add("b")
    turns.remove("a")
    assert turns.take({"a", "b"}) == "b"


def test_a_drain_waits_for_what_runs_and_can_run_and_not_for_what_lacks_an_operation_before_it() -> None:
    training = Training[int, int]()
    for number in (1, 2, 4):
        training.submit(number, str(number), number)
    assert training.left == 2, "3 is missing, so 4 cannot run"
    entry, _ = training.begin()
    assert training.left == 2, "one runs"
    training.end(entry, 0)
    assert training.left == 1
    training.submit(3, "3", 3)
    assert training.left == 3
