"""The log of step reports: from the past on, for any number of watchers, and bounded."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from sluice.rpc import SluiceError
from sluice.v1.trainer_pb2 import StepReport
from sluice.versions import Version
from trainer_svc.checkpoint.batch_record import KEPT_REPORTS
from trainer_svc.service.trainer import StepLog


def report(number: int) -> StepReport:
    return StepReport(policy_version=Version(1, number).to_proto())


async def numbers(log: StepLog, from_number: int, count: int) -> list[int]:
    found: list[int] = []
    async with aclosing(log.follow(from_number)) as reports, asyncio.timeout(10):
        async for each in reports:
            found.append(each.policy_version.number)
            if len(found) == count:
                break
    return found


async def test_a_watcher_gets_past_reports_first_and_then_new_ones() -> None:
    log = StepLog(begins_after=4)
    log.append(report(5))
    watching = asyncio.create_task(numbers(log, 5, 3))
    await asyncio.sleep(0)
    log.append(report(6))
    log.append(report(7))
    assert await watching == [5, 6, 7]
    assert await numbers(log, 7, 1) == [7]
    assert await numbers(log, 0, 3) == [5, 6, 7], "0 is the oldest one kept"


async def test_reports_that_are_not_kept_are_refused() -> None:
    log = StepLog(begins_after=0)
    for number in range(1, KEPT_REPORTS + 3):
        log.append(report(number))
    assert log.first_number == 3
    with pytest.raises(SluiceError, match="watch from 3 on") as error:
        await numbers(log, 2, 1)
    assert error.value.reason == "REPORT_NOT_KEPT"


async def test_a_watcher_reads_to_the_end_before_it_learns_what_ended_it() -> None:
    log = StepLog(begins_after=0)
    log.append(report(1))
    log.end(SluiceError.aborted("EPOCH_CHANGED", "over"))
    assert await numbers(log, 1, 1) == [1]
    with pytest.raises(SluiceError, match="over"):
        await numbers(log, 1, 2)
