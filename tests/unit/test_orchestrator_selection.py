"""Which groups make the next batch: the rule by examples, and the selection against the rule written down plainly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator_svc.run import scheduler as module
from orchestrator_svc.run.scheduler import Candidate, Selection


def selection(size: int, window: int, candidates: Sequence[Candidate], **options: bool) -> Selection:
    made = Selection(size, window, **options)
    for each in candidates:
        made.put(each)
    return made


def candidates(ready: str, last: int = 100) -> list[Candidate]:
    """One candidate per letter: `r` is ready, `.` is under way."""
    return [Candidate(number, letter == "r", last) for number, letter in enumerate(ready)]


def test_younger_groups_pass_the_oldest_only_within_the_window() -> None:
    assert selection(4, 5, candidates(".rrrrr")).choose(1) == [1, 2, 3, 4]
    assert selection(4, 4, candidates(".rrrrr")).choose(1) is None
    assert selection(4, 3, candidates("rr.rr")).choose(1) == [0, 1, 3, 4]


def test_those_that_passed_a_group_before_count() -> None:
    passed = [Candidate(0, ready=False, last_batch=90, passed=3), *candidates(".rrr")[1:]]
    made = selection(3, 6, passed)
    assert made.choose(2) is None, "it would be passed by six, and five may"
    made.put(Candidate(0, ready=True, last_batch=100, passed=3))
    assert made.choose(2) == [0, 1, 2]


def test_no_group_is_passed_when_that_would_make_it_too_late() -> None:
    due = [Candidate(0, ready=False, last_batch=7), *candidates(".rrrr")[1:]]
    assert selection(4, 10, due).choose(6) == [1, 2, 3, 4]
    assert selection(4, 10, due).choose(7) is None


def test_groups_that_are_due_go_before_older_ones_that_are_not() -> None:
    mixed = [Candidate(0, True, 9), Candidate(1, True, 9), Candidate(2, True, 5), Candidate(3, True, 5)]
    assert selection(2, 1, mixed).choose(5) == [2, 3]


def test_late_groups_are_named_once_they_can_be_in_no_batch() -> None:
    made = selection(2, 1, [Candidate(0, True, 4), Candidate(1, False, 3), Candidate(2, True, 3)])
    assert made.late(3) == []
    assert made.late(4) == [2], "one under way may yet be given up by its owner"
    assert made.late(5) == [0, 2]


@dataclass
class PlainRule:
    """The rule, applied to a list of candidates that is sorted and counted again for every choice."""

    size: int
    window: int
    late_is_due: bool
    candidates: dict[int, Candidate] = field(default_factory=dict)

    def choose(self, batch: int) -> list[int] | None:
        everyone = [
            replace(each, last_batch=max(each.last_batch, batch) if self.late_is_due else each.last_batch)
            for _, each in sorted(self.candidates.items())
        ]
        return self._choose(everyone, batch)

    def _choose(self, everyone: list[Candidate], batch: int) -> list[int] | None:
        ready = [each for each in everyone if each.ready]
        if len(ready) < self.size:
            return None
        first_in = ready[: self.size]
        most_urgent = sorted(ready, key=lambda each: (each.last_batch, each.group))[: self.size]
        for picked in (first_in, most_urgent):
            if not self._overloaded(everyone, picked, batch):
                return None if self._overtakes(everyone, picked) else sorted(each.group for each in picked)
        tightest = max(self._overloaded(everyone, most_urgent, batch))
        if any(not each.ready and each.last_batch <= tightest for each in everyone):
            return None
        return sorted(each.group for each in most_urgent)

    def _overloaded(self, everyone: list[Candidate], picked: list[Candidate], batch: int) -> list[int]:
        chosen = {each.group for each in picked}
        due = sorted(each.last_batch for each in everyone if each.group not in chosen)
        return [last for place, last in enumerate(due) if last < batch + 1 + place // self.size]

    def _overtakes(self, everyone: list[Candidate], picked: list[Candidate]) -> bool:
        oldest = next((each for each in everyone if not each.ready), None)
        if oldest is None:
            return False
        younger = sum(each.group > oldest.group for each in picked)
        return younger > 0 and oldest.passed + younger > self.window - 1


GROUPS = 16

STATES = st.tuples(st.sampled_from(["ready", "ready", "running"]), st.integers(1, 6))
"""Whether a group is ready, and its last batch."""

MOVES = st.one_of(
    st.tuples(st.integers(0, GROUPS - 1), STATES),  # also of a number below others: a restart draws older ones again
    st.tuples(st.integers(0, GROUPS - 1), st.just(("gone", 0))),
    st.tuples(st.none(), st.just(("take", 0))),
)


@pytest.mark.slow
@settings(max_examples=400)
@given(
    size=st.integers(1, 4),
    window=st.integers(1, 8),
    late_is_due=st.booleans(),
    first=st.lists(STATES, min_size=4, max_size=GROUPS),
    moves=st.lists(MOVES, min_size=8, max_size=40),
)
def test_the_selection_is_the_plain_rule(size, window, late_is_due, first, moves) -> None:
    made, plain, batch = Selection(size, window, late_is_due=late_is_due), PlainRule(size, window, late_is_due), 1
    for group, (state, last) in [*enumerate(first), *moves]:
        if state == "take":
            chosen = made.choose(batch)
            assert chosen == plain.choose(batch)
            for number in chosen or ():
                made.discard(number)
                del plain.candidates[number]
            for each in list(plain.candidates.values()):
                if not each.ready:
                    by = sum(number > each.group for number in chosen or ())
                    plain.candidates[each.group] = replace(each, passed=each.passed + by)
                    made.put(plain.candidates[each.group])
            batch += chosen is not None
        elif state == "gone":
            made.discard(group)
            plain.candidates.pop(group, None)
        else:
            before = plain.candidates.get(group)
            plain.candidates[group] = Candidate(group, state == "ready", last, before.passed if before else 0)
            made.put(plain.candidates[group])
        late = sorted(each.group for each in plain.candidates.values() if each.ready and each.last_batch < batch)
        assert made.late(batch) == late


def instructions(work: Callable[[], object]) -> int:
    """Return how many bytecode instructions the module executes for some work: its loops, whatever the machine does beside it."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("late_is_due", [False, True])
def test_a_batch_costs_as_much_as_it_is_large_however_many_groups_wait(late_is_due: bool) -> None:
    size = 64

    def cost(waiting: int) -> int:
        """Return the cost of one batch: it is chosen and leaves, and the same number of groups are drawn and become ready."""
        groups = [Candidate(number, number % 3 > 0, 1000 + number % 7) for number in range(size, waiting)]
        urgent = [Candidate(waiting + number, True, 1) for number in range(5)]  # so that age alone does not decide
        made = selection(size, waiting, groups + urgent, late_is_due=late_is_due)

        def batch() -> None:
            chosen = made.choose(1)
            assert chosen is not None
            assert chosen[-1] == urgent[-1].group
            for number in chosen:
                made.discard(number)
                made.put(Candidate(2 * waiting + number, False, 1000))
                made.put(Candidate(2 * waiting + number, True, 1000))

        return instructions(batch)

    few, many = cost(500), cost(8_000)
    assert 0 < many < 1.1 * few
