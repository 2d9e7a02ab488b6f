"""Threads for calls that may hang; `test_environment_calls` has the rest of their contract."""

from __future__ import annotations

import subprocess
import sys

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
        [sys.executable, "-c", HANG_AND_LEAVE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "gave up\n"
