"""The log has the beginning and the end of a row of equal answers, however many clients poll."""

from __future__ import annotations

import grpc
import pytest
from structlog.testing import capture_logs

from sluice.rpc import server
from sluice.rpc.rows import QUIET_S, Rows
from sluice.rpc.server import MethodMetrics


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch) -> Time:
    """The time of the rows of this process, which begin with none."""
    time = Time()
    monkeypatch.setattr(server, "ROWS", Rows(time))
    return time


def info_lines(lines: list) -> list:
    return [each for each in lines if each["log_level"] != "debug"]


def test_agents_that_poll_write_two_lines(time) -> None:
    polled, other = MethodMetrics("Rows", "LeaseTasks"), MethodMetrics("Rows", "RenewLease")
    with capture_logs() as lines:
        for number in range(1000):
            polled.end(grpc.StatusCode.RESOURCE_EXHAUSTED, 0.001)
            if number % 3 == 0:  # some get work meanwhile
                polled.end(grpc.StatusCode.OK, 0.001)
            time.now += QUIET_S / 2
        time.now += QUIET_S
        other.end(grpc.StatusCode.OK, 0.001)
    began, ended = info_lines(lines)
    assert (began["rpc"], began["code"]) == ("Rows/LeaseTasks", "RESOURCE_EXHAUSTED")
    assert (ended["call"], ended["outcome"], ended["count"]) == ("Rows/LeaseTasks", "RESOURCE_EXHAUSTED", 1000)
    assert ended["seconds"] == 999 * QUIET_S / 2


def test_another_answer_and_a_later_row_begin_anew(time) -> None:
    method = MethodMetrics("Rows", "LeaseTasks")
    with capture_logs() as lines:
        method.end(grpc.StatusCode.RESOURCE_EXHAUSTED, 0.001)
        method.end(grpc.StatusCode.NOT_FOUND, 0.001)
        time.now += QUIET_S
        method.end(grpc.StatusCode.RESOURCE_EXHAUSTED, 0.001)
    assert [each["code"] for each in info_lines(lines)] == ["RESOURCE_EXHAUSTED", "NOT_FOUND", "RESOURCE_EXHAUSTED"]


def test_each_fault_of_the_server_is_told(time) -> None:
    method = MethodMetrics("Rows", "LeaseTasks")
    with capture_logs() as lines:
        for _ in range(3):
            method.end(grpc.StatusCode.INTERNAL, 0.001)
    assert [each["log_level"] for each in lines] == ["warning"] * 3


def test_rows_that_ended_are_forgotten(time) -> None:
    seen = Rows(time)
    for number in range(100):
        assert seen.begins(f"path-{number}", "404")
        time.now += QUIET_S
    assert all(seen.begins(f"path-{number}", "404") for number in range(99))
