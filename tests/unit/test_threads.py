"""Threads for calls that may hang; `test_environment_calls` has the rest of their contract."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading

import pytest
from simulated_clock import LIMIT_S

from sluice.threads import DeadlineThreads, SerialThread

CHILD_S = 280.0
"""Limit for a process that imports a service; one on a quiet machine takes seconds."""

HANG_AND_LEAVE = """
import asyncio, threading
from sluice.threads import CallHungError, DeadlineThreads

async def main():
    try:
        await DeadlineThreads("test", 1, 0.01, 1).run(threading.Event().wait)
    except CallHungError:
        print("gave up")

asyncio.run(main())
"""


def test_a_hung_call_does_not_keep_the_process_from_ending() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANG_AND_LEAVE], capture_output=True, text=True, timeout=CHILD_S, check=True
    )
    assert done.stdout.startswith("gave up\n")


HANG_IN_THE_JOURNAL = """
import asyncio, sys, threading
from pathlib import Path
from orchestrator_svc.journal.segments import Disk
from orchestrator_svc.journal.store import Journal, JournalLimits
from sluice.v1 import journal_pb2

class Dead(Disk):
    def commit(self, connection):
        if answers:
            super().commit(connection)
        else:
            threading.Event().wait()

async def main():
    global answers
    answers = True
    journal = Journal(Path(sys.argv[1]), {"run": "r"}, limits=JournalLimits(fsync_interval_s=0.0), disk=Dead())
    answers = False
    journal.record_fact(journal_pb2.Fact(epoch_allotted=journal_pb2.EpochAllotted(epoch=1)))
    try:
        async with asyncio.timeout(0.1):
            await journal.close()
    except TimeoutError:
        print("gave up")

asyncio.run(main())
"""


def test_a_journal_on_a_dead_disk_does_not_keep_the_process_from_ending(tmp_path) -> None:
    words = [sys.executable, "-c", HANG_IN_THE_JOURNAL, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=CHILD_S, check=True)
    assert done.stdout.startswith("gave up\n")


async def test_a_thread_that_was_ended_refuses_further_calls() -> None:
    thread = SerialThread("test")
    answer = thread.submit(lambda: 1)
    thread.end()
    assert await answer == 1
    with pytest.raises(RuntimeError, match="ended"):
        thread.submit(lambda: 2)


async def test_a_thread_whose_call_has_ended_takes_the_next_one() -> None:
    threads = DeadlineThreads("test", 2, LIMIT_S, 1)
    assert await threads.run(threading.get_ident) == await threads.run(threading.get_ident)


@pytest.mark.slow
async def test_threads_end_with_their_owner() -> None:
    threads = DeadlineThreads("test", 1, LIMIT_S, 1)
    thread = await threads.run(threading.current_thread)
    del threads
    gc.collect()
    await asyncio.to_thread(thread.join, LIMIT_S)
    assert not thread.is_alive()
