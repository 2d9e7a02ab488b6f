"""The supervisor over real, tiny child processes. Its time is simulated, or stands still: events decide."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from simulated_clock import SimulatedClock
from supervised import Witness, ending, eventually, gone, run, supervisor, wait_for

from sluice.supervise.restart_policy import FIRST_DELAY_S, SETTLED_S
from sluice.supervise.supervisor import ChildLog, ChildSpec, ChildState, Ending, LogLimit

RECORD_BYTES = 130
"""A record of a short text of a child whose name has five letters: 119 to 126 bytes, by its time."""

READY = """
import os, pathlib, signal, subprocess, sys, time

def until(path):
    while not path.exists():
        time.sleep(0.01)

flag, seen = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]).with_suffix(".seen")
seen.unlink(missing_ok=True)
flag.write_text(str(os.getpid()))
until(seen)
"""
"""A child reports that it serves by a file with its process id, and continues when the supervisor has seen it."""

SERVE = READY + "time.sleep(600)"


def spec(tmp_path: Path, name: str, code: str, **more: Any) -> ChildSpec:
    flag = tmp_path / f"{name}.pid"

    async def serves() -> None:
        while not flag.exists() or not flag.read_text():  # noqa: ASYNC110 - another process sets it
            await asyncio.sleep(0.01)
        flag.rename(flag.with_suffix(".seen"))

    argv = (sys.executable, "-S", "-c", code, str(flag))
    return ChildSpec(name, argv, tmp_path / "logs" / f"{name}.log", serves, **more)


def pid_of(tmp_path: Path, name: str) -> int:
    return int((tmp_path / f"{name}.seen").read_text())


async def test_the_end_of_the_deciding_child_ends_all_others(tmp_path: Path) -> None:
    witness = Witness()
    other = spec(tmp_path, "other", SERVE)
    decider = spec(tmp_path, "decider", READY + "until(flag.with_name('other.seen'))", ends_run=True)
    outcome = await run([other, decider], witness)
    assert (outcome.ending, outcome.child) == (Ending.SUCCEEDED, "decider")
    assert not psutil.pid_exists(pid_of(tmp_path, "other"))


async def test_a_child_that_follows_another_starts_when_that_one_serves(tmp_path: Path) -> None:
    witness = Witness()
    first = spec(tmp_path, "first", SERVE)
    follower = spec(tmp_path, "follower", READY, after=("first",), ends_run=True)
    assert (await run([follower, first], witness)).ending is Ending.SUCCEEDED
    seen = [(name, state) for name, state, _ in witness.states]
    assert seen.index(("first", ChildState.SERVING)) < seen.index(("follower", ChildState.STARTING))


async def test_a_killed_child_is_restarted_and_the_run_continues(tmp_path: Path) -> None:
    witness = Witness()
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor([spec(tmp_path, "worker", SERVE)], witness).run(stop))
    await eventually(lambda: witness.count("worker", ChildState.SERVING) == 1)
    os.kill(pid_of(tmp_path, "worker"), signal.SIGKILL)
    await eventually(lambda: witness.count("worker", ChildState.SERVING) == 2)
    stop.set()
    assert (await ending(running)).ending is Ending.STOPPED
    assert restarts(witness) == ["ended with signal SIGKILL; restart 1 of 3 now"]


def restarts(witness: Witness) -> list[str]:
    return [detail for _, state, detail in witness.states if state is ChildState.RESTARTING]


@pytest.mark.parametrize(("served_s", "pause"), [(SETTLED_S, "now"), (SETTLED_S - 1, f"in {FIRST_DELAY_S:g} s")])
async def test_a_child_that_dies_soon_again_waits_before_its_next_start(
    tmp_path: Path, served_s: float, pause: str
) -> None:
    witness, stop, clock = Witness(), asyncio.Event(), SimulatedClock()
    running = asyncio.create_task(supervisor([spec(tmp_path, "worker", SERVE)], witness, clock=clock).run(stop))
    for starts in (1, 2):
        await eventually(lambda starts=starts: witness.count("worker", ChildState.SERVING) == starts)
        clock.now += served_s if starts == 2 else 0.0
        os.kill(pid_of(tmp_path, "worker"), signal.SIGKILL)
        await eventually(lambda starts=starts: len(restarts(witness)) == starts)
    assert restarts(witness)[-1].endswith(pause)
    if pause != "now":
        await clock.advance(FIRST_DELAY_S - 0.1)
        assert witness.count("worker", ChildState.STARTING) == 2
        await clock.advance(0.2)
    await eventually(lambda: witness.count("worker", ChildState.SERVING) == 3)
    stop.set()
    assert (await ending(running)).ending is Ending.STOPPED


async def test_a_child_that_may_leave_is_not_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    witness, end = Witness(), tmp_path / "end"
    leaves = spec(tmp_path, "leaves", READY, may_leave="was drained")
    decider = spec(tmp_path, "decider", READY + f"until(pathlib.Path({str(end)!r}))", ends_run=True)
    running = asyncio.create_task(run([leaves, decider], witness))
    await eventually(lambda: witness.count("leaves", ChildState.LEFT) == 1)
    end.touch()
    outcome = await running
    assert (outcome.ending, outcome.child) == (Ending.SUCCEEDED, "decider")
    assert witness.count("leaves", ChildState.LEFT) == 1
    assert witness.count("leaves", ChildState.STARTING) == 1


def texts(log: Path) -> list[str]:
    """Return the messages of a log whose lines are JSON."""
    return [json.loads(line)["event"] for line in log.read_text().splitlines()]


async def test_a_child_that_may_leave_but_fails_is_started_again(tmp_path: Path) -> None:
    witness = Witness()
    fails = spec(tmp_path, "fails", READY + "sys.exit(1)", may_leave="was drained")
    outcome = await run([fails, spec(tmp_path, "other", SERVE)], witness, max_restarts=1)
    assert (outcome.ending, outcome.child) == (Ending.FAILED, "fails")
    assert witness.count("fails", ChildState.RESTARTING) == 1


async def test_after_the_last_restart_the_outcome_has_the_child_the_reason_and_its_last_lines(tmp_path: Path) -> None:
    witness = Witness()
    dies = spec(tmp_path, "dies", READY + "print('the reason'); sys.exit(7)")
    outcome = await run([dies], witness, max_restarts=1)
    assert (outcome.ending, outcome.child) == (Ending.FAILED, "dies")
    assert "exit code 7" in outcome.reason
    assert outcome.tail[-1] == "the reason"
    assert texts(dies.log_path) == ["the reason"] * 2


async def test_wrong_settings_end_the_run_at_once(tmp_path: Path) -> None:
    witness = Witness()
    wrong = spec(tmp_path, "wrong", "import sys; print('sluice: lr: no'); sys.exit(2)")
    outcome = await run([wrong, spec(tmp_path, "fine", SERVE)], witness)
    assert (outcome.ending, outcome.child, outcome.tail) == (Ending.FAILED, "wrong", ("sluice: lr: no",))
    assert witness.count("wrong", ChildState.RESTARTING) == 0


async def test_a_child_that_never_serves_fails_by_its_deadline(tmp_path: Path) -> None:
    clock = SimulatedClock()
    mute = spec(tmp_path, "mute", "import time; time.sleep(600)", start_s=30.0)
    running = asyncio.create_task(run([mute], Witness(), clock=clock))
    await eventually(lambda: clock.waits)
    await clock.advance(29.9)
    assert not running.done()
    await clock.advance(0.2)
    outcome = await running
    assert (outcome.ending, outcome.child) == (Ending.FAILED, "mute")
    assert "did not serve within 30 s" in outcome.reason


async def test_stop_ends_even_a_child_that_ignores_sigterm_and_its_grandchildren(tmp_path: Path) -> None:
    grandchild = tmp_path / "grandchild.pid"
    stubborn = (
        "import signal, subprocess, sys, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(grandchild)!r}).write_text(str(child.pid))" + SERVE
    )
    witness, stop, clock = Witness(), asyncio.Event(), SimulatedClock()
    specs = [spec(tmp_path, "stubborn", stubborn, drain_s=3.0)]
    running = asyncio.create_task(supervisor(specs, witness, stop_margin_s=1.0, clock=clock).run(stop))
    await eventually(lambda: witness.count("stubborn", ChildState.SERVING) == 1)
    stop.set()
    await eventually(lambda: witness.count("stubborn", ChildState.STOPPING) == 1)
    await clock.advance(3.9)
    assert not gone(pid_of(tmp_path, "stubborn"))
    await clock.advance(0.2)
    assert (await ending(running)).ending is Ending.STOPPED
    await eventually(lambda: gone(pid_of(tmp_path, "stubborn")) and gone(int(grandchild.read_text())))


async def test_a_child_gets_sigterm_and_time_to_drain(tmp_path: Path) -> None:
    drains = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('drained', flush=True), sys.exit(0)))"
        + SERVE
    )
    witness, stop = Witness(), asyncio.Event()
    running = asyncio.create_task(supervisor([spec(tmp_path, "polite", drains)], witness).run(stop))
    await eventually(lambda: witness.count("polite", ChildState.SERVING) == 1)
    stop.set()
    assert (await ending(running)).ending is Ending.STOPPED
    assert [line.text for _, line in witness.lines] == ["drained"]


async def test_a_child_that_needs_all_its_seconds_to_drain_is_not_killed(tmp_path: Path) -> None:
    done = tmp_path / "done"
    slow = (
        "import signal, sys, pathlib;"
        f"end = lambda *_: (until(pathlib.Path({str(done)!r})), print('drained', flush=True), sys.exit(0));"
        "signal.signal(signal.SIGTERM, end)" + SERVE
    )
    witness, stop, clock = Witness(), asyncio.Event(), SimulatedClock()
    patient = spec(tmp_path, "patient", slow, drain_s=10.0)
    running = asyncio.create_task(supervisor([patient], witness, stop_margin_s=1.0, clock=clock).run(stop))
    await eventually(lambda: witness.count("patient", ChildState.SERVING) == 1)
    stop.set()
    await eventually(lambda: witness.count("patient", ChildState.STOPPING) == 1)
    await clock.advance(10.9)
    done.touch()
    assert (await ending(running)).ending is Ending.STOPPED
    assert [line.text for _, line in witness.lines] == ["drained"]


async def test_a_program_that_does_not_exist_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    absent = ChildSpec("absent", ("/no/such/program",), tmp_path / "absent.log", asyncio.Event().wait)
    with pytest.raises(FileNotFoundError):
        await run([absent, spec(tmp_path, "fine", SERVE)], Witness())


@pytest.mark.slow
def test_a_sigkill_of_the_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = (
        "import os, subprocess, sys, time;"
        "grandchild = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']);"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{grandchild.pid}}\\n'); time.sleep(600)"
    )
    program = f"""
import asyncio, sys
from pathlib import Path
from sluice.supervise.supervisor import ChildSpec, Supervisor
class Nobody:
    def on_line(self, child, line): pass
    def on_state(self, child, state, detail): pass
spec = ChildSpec("c", (sys.executable, "-S", "-c", {child!r}), Path({str(tmp_path / "c.log")!r}), asyncio.Event().wait)
asyncio.run(Supervisor([spec], Nobody()).run(asyncio.Event()))
"""
    with subprocess.Popen([sys.executable, "-c", program]) as supervisor:
        wait_for(lambda: pids.exists() and pids.read_text().endswith("\n"))
        supervisor.kill()
    leader, grandchild = map(int, pids.read_text().split())
    wait_for(lambda: gone(leader) and gone(grandchild))


async def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(tmp_path: Path) -> None:
    """The disk is full from the second line to the third; a limit on the file's size stands for it."""
    path, said = tmp_path / "logs/child.log", []
    log, stream = ChildLog(path, LogLimit()), asyncio.StreamReader()
    following = asyncio.create_task(log.follow(stream, said.append))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        stream.feed_data(b"one\n")
        await eventually(lambda: len(said) == 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 2, hard))
        stream.feed_data(b"two\nthree\n")
        await eventually(lambda: len(said) == 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    stream.feed_data(b"four\n")
    stream.feed_eof()
    await following
    assert texts(path) == ["one", "lines are missing here, which could not be written", "four"]
    assert json.loads(path.read_text().splitlines()[1])["lines"] == 2
    warning = said.pop(1)
    assert warning.level == 30
    assert "its lines are missing until there is room" in warning.text
    assert [line.text for line in said] == log.tail() == ["one", "two", "three", "four"]


async def test_a_log_that_is_full_begins_a_new_file_and_the_oldest_goes(tmp_path: Path) -> None:
    limit = LogLimit(file_bytes=2 * RECORD_BYTES, files=2)
    child = f"{READY}for each in 'abcdefghi':\n    print(each * 3)"
    stranger = tmp_path / "logs/child.1.log"  # the log of the second node of a service on a cluster
    stranger.parent.mkdir()
    stranger.write_text("its own")
    await run([spec(tmp_path, "child", child, ends_run=True, log_limit=limit)], Witness())
    assert stranger.read_text() == "its own"
    logs = {path.name: texts(path) for path in (tmp_path / "logs").iterdir() if path != stranger}
    assert logs == {"child.log": ["iii"], "child.log.1": ["ggg", "hhh"], "child.log.2": ["eee", "fff"]}


async def test_a_line_that_is_larger_than_a_log_is_written_whole_and_no_empty_file_kept(tmp_path: Path) -> None:
    log, stream = ChildLog(tmp_path / "child.log", LogLimit(file_bytes=4, files=1)), asyncio.StreamReader()
    stream.feed_data(b"twelve letters\nb\n")
    stream.feed_eof()
    await log.follow(stream, lambda _: None)
    assert texts(tmp_path / "child.log") == ["b"]
    assert texts(tmp_path / "child.log.1") == ["twelve letters"]


async def test_a_log_that_cannot_be_opened_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way of the directory")
    witness = Witness()
    outcome = await run([spec(tmp_path, "child", READY + "print('done')", ends_run=True)], witness)
    assert outcome.ending is Ending.SUCCEEDED
    assert [line.text for _, line in witness.lines][1:] == ["done"]
