"""What `sluice bench e2e` computes from the steps of a session, and from looks at processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from argparse import Namespace

import pytest

from benchmarks.e2e import SETTLED, Session, _results
from benchmarks.process_tree import CpuMeter


def session(rewards: list[float], step_s: float = 0.5) -> Session:
    return Session(rewards, [step_s * (number + 1) for number in range(len(rewards))])


def test_a_goal_is_reached_when_the_mean_of_three_steps_is() -> None:
    one = session([0.5, 0.9, 0.9, 0.7, 0.9, 0.95])
    assert one.reached_s(0.83) == 2.0
    assert one.reached_s(0.84) == 3.0
    assert one.reached_s(0.9) is None


def test_one_good_step_reaches_nothing() -> None:
    assert session([1.0, 0.0, 0.0]).reached_s(0.85) is None
    assert session([1.0]).reached_s(0.85) is None


def test_the_first_steps_are_left_out_of_the_speed() -> None:
    slow_start = Session([0.5] * (SETTLED + 4), [9.0] * SETTLED + [9.2, 9.4, 9.6, 9.8])
    assert slow_start.step_s == pytest.approx(0.2)


BUSY = """
import sys, time
end = time.process_time() + 0.4
while time.process_time() < end: pass
print(sys.argv[1], time.process_time(), flush=True)
input()
"""
"""Uses CPU, says how much, and waits."""

TICKS_S = 0.05
"""Seconds that the kernel's user and system times, counted in ticks of 10 ms, may lack, and that reporting them takes."""


@pytest.mark.slow
def test_cpu_is_counted_by_the_service_that_used_it() -> None:
    used, said = asyncio.run(_used_by_a_service_and_its_child())
    assert min(said["orchestrator"], said["child"]) >= 0.4
    assert used["orchestrator"] == pytest.approx(said["orchestrator"], abs=TICKS_S)
    assert used["environments"] == pytest.approx(said["child"], abs=TICKS_S)
    assert set(used) <= {"orchestrator", "environments", "rest"}


async def _used_by_a_service_and_its_child() -> tuple[dict[str, float], dict[str, float]]:
    """Run a tree of three: a top, a service named in its command line, and the service's child.

    Returns:
        The CPU seconds that were counted, and those that service and child say that they used.
    """
    child = f"subprocess.Popen([sys.executable, '-c', {BUSY!r}, 'child'], stdin=subprocess.PIPE)"
    service = f"import subprocess, sys\nchild = {child}\n{BUSY}"
    top = "import subprocess, sys\ninput()\nsubprocess.run([sys.executable, '-c', sys.argv[1], 'orchestrator'])"
    process = subprocess.Popen(  # noqa: ASYNC220 - reading its pipe is what takes time, and that is in a thread
        [sys.executable, "-c", top, service], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    meter, begun = CpuMeter(), time.time()
    following = asyncio.create_task(meter.follow(process.pid))
    await asyncio.sleep(0)  # the first look, before the service starts
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    lines = [(await asyncio.to_thread(process.stdout.readline)).split() for _ in range(2)]
    following.cancel()
    last = asyncio.create_task(meter.follow(process.pid))
    await asyncio.sleep(0)  # one more look
    last.cancel()
    process.communicate("\n")
    return meter.between(begun, time.time()), {name: float(seconds) for name, seconds in lines}


def test_the_side_that_reaches_the_goal_soonest_stands_for_ours() -> None:
    slow, quick = session([0.9] * 20, 0.3), session([0.9] * 20, 0.1)
    never, theirs = session([0.1] * 20, 0.05), session([0.9] * 20, 0.2)
    results = _results(Namespace(), {"vllm 1": [slow], "transformers 1": [quick], "vllm 2": [never], "trl": [theirs]})
    assert results["ours"] == "transformers 1"
    assert results["trl_step_over_ours"] == pytest.approx(2.0)
    assert results["trl_sync_over_ours"] == pytest.approx(2.0)
    assert "trl_sync_over_vllm 2" not in results["ratios"]
