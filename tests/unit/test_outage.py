"""When a run pauses because groups of many tasks fail, how often it tries again, and when it gives up."""

from __future__ import annotations

from orchestrator_svc.run.faults import LONGEST_PAUSE_S, Outage


def fail(
    outage: Outage, group: int, now: float = 0.0, *, task: str = "", shared: bool = True, heals: bool = True
) -> bool:
    begins = outage.failed(group, ("a", task or f"t{group}"), now, shared=shared, heals=heals)
    outage.ended(group)
    return begins


def in_pause(most_groups: int = 3) -> Outage:
    outage = Outage(most_groups, 2, 100.0, 10.0, proven=True)
    assert [fail(outage, group) for group in (1, 2)] == [False, True]
    return outage


def test_groups_of_different_tasks_that_fail_in_a_row_begin_a_pause() -> None:
    outage = Outage(10, 3, 100.0, 10.0)
    assert [fail(outage, group, task="t") for group in range(5)] == [False] * 5, "it may be this task's fault"
    assert not fail(outage, 6)
    assert not outage.succeeded()
    assert [fail(outage, group) for group in range(3)] == [False, False, True]
    assert (outage.active, list(outage.tasks)) == (True, [("a", "t0"), ("a", "t1"), ("a", "t2")])


def test_as_many_failures_as_the_run_may_have_begin_a_pause_whatever_they_are() -> None:
    outage = Outage(3, 2, 100.0, 10.0)
    assert [fail(outage, group, shared=False) for group in range(3)] == [False, False, True]


def test_one_group_at_a_time_is_tried_after_a_pause_that_grows() -> None:
    outage, now, waits = in_pause(), 0.0, []
    for group in range(3, 12):
        began = now
        while not outage.may_start(now):
            now += 1.0
        waits.append(now - began)
        outage.started(group, now, awaited=True)
        assert not outage.may_start(now + 1000.0), "it has not ended"
        fail(outage, 100 + group, now)  # it was under way when the pause began
        fail(outage, group, now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[LONGEST_PAUSE_S] * 3]
    outage.try_now(now)
    assert outage.may_start(now)
    assert outage.succeeded()
    assert (outage.active, outage.in_a_row, outage.may_start(now)) == (False, 0, True)


def test_a_group_whose_agents_may_never_come_is_not_waited_for() -> None:
    outage = in_pause()
    outage.started(3, 1.0, awaited=False)
    assert [outage.may_start(now) for now in (1.0, 2.9, 3.0)] == [False, False, True]


def test_the_run_ends_after_so_many_failures_and_so_long_a_pause() -> None:
    outage = in_pause(most_groups=3)
    assert not outage.hopeless(1000.0, heals=True), "two groups failed"
    fail(outage, 3, 50.0)
    assert [outage.hopeless(now, heals=True) for now in (99.0, 100.0)] == [False, True]


def test_a_fault_that_waiting_cannot_cure_begins_no_pause() -> None:
    outage = Outage(3, 2, 100.0, 10.0)
    assert [fail(outage, group, shared=False, heals=False) for group in range(3)] == [False] * 3
    assert outage.hopeless(0.0, heals=False)


def test_a_run_of_which_no_group_ever_succeeded_waits_less_and_needs_fewer_failures() -> None:
    outage = Outage(100, 2, 100.0, 10.0)
    assert [fail(outage, group) for group in (1, 2)] == [False, True]
    assert (outage.limit_s, [outage.hopeless(now, heals=True) for now in (9.0, 10.0)]) == (10.0, [False, True])
    assert outage.succeeded()
    assert [fail(outage, group) for group in (3, 4)] == [False, True]
    assert (outage.limit_s, outage.hopeless(1000.0, heals=True)) == (100.0, False)
    assert Outage(100, 2, 5.0, 10.0).limit_s == 5.0
