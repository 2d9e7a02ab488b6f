"""The lint rule finds short waits in tests wherever they are written, and leaves alone what cannot fail on a busy machine."""

from __future__ import annotations

import pytest
from lint_waits import short_waits

REFUSED = {
    "keyword": "replica(progress_s=0.5)",
    "timeout": "call(request, timeout=0.3)",
    "sleep": "async def f():\n    await asyncio.sleep(0.2)",
    "limit": "async def f():\n    async with asyncio.timeout(0.9): pass",
    "wait_for": "asyncio.wait_for(task, 0.1)",
    "timedelta": "timedelta(milliseconds=250)",
    "dict": 'start(deadlines={"step_s": 0.1})',
    "dotted key": 'start({"trainer.deadlines.step_s": 0.1})',
    "constant": "SOON_S = 0.4\nreplica(lease_s=SOON_S)",
    "arithmetic": "LOOK_S = 0.1\ntime.sleep(LOOK_S * 1.5)",
    "joined thread": "thread.join(0.5)",
    "method": "class Test:\n    def test(self):\n        time.sleep(0.1)",
}

ALLOWED = {
    "long": "replica(progress_s=60.0)",
    "zero": "async def f():\n    await asyncio.sleep(0)",
    "poll": "async def f():\n    while not done():\n        await asyncio.sleep(0.01)",
    "poll of a thread": "while not done.wait(0.01): pass",
    "simulated": "from simulated_clock import SimulatedClock\nreplica(progress_s=0.5)",
    "marked": "@pytest.mark.clock(reason='SIGSTOP')\ndef test():\n    time.sleep(0.1)",
    "marked module": "pytestmark = pytest.mark.clock(reason='kernel')\ntime.sleep(0.1)",
    "interval": "service(heartbeat_s=0.05, mirror_poll_s=0.05)",
    "metric": 'metrics({"weights/diff_s": 0.1})',
    "unknown": "replica(progress_s=limit)",
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_a_short_wait_is_found(text: str) -> None:
    assert len(short_waits(text)) == 1


@pytest.mark.parametrize("text", ALLOWED.values(), ids=ALLOWED)
def test_what_cannot_fail_on_a_busy_machine_is_left_alone(text: str) -> None:
    assert short_waits(text) == []


def test_a_place_is_named_by_its_line() -> None:
    assert short_waits("\n\nreplica(progress_s=0.5)") == [(3, "progress_s of 0.5 s")]
