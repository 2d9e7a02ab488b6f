"""A child starts once its supervisor has told the watchdog about it, and never if the supervisor is gone."""

from __future__ import annotations

import os
import subprocess
import sys

from sluice.supervise import guard


def behind_barrier(*argv: str) -> tuple[subprocess.Popen[str], int]:
    barrier, go_ahead = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, "start", str(barrier), *argv],
            pass_fds=[barrier],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(barrier)
    return process, go_ahead


def test_the_program_runs_in_the_same_process_after_the_go_ahead() -> None:
    process, go_ahead = behind_barrier(sys.executable, "-c", "import os; print(os.getpid())")
    assert process.poll() is None
    os.write(go_ahead, b"+")
    os.close(go_ahead)
    output, _ = process.communicate(timeout=30)
    assert (int(output), process.returncode) == (process.pid, 0)


def test_the_program_never_starts_if_the_pipe_closes_first() -> None:
    process, go_ahead = behind_barrier(sys.executable, "-c", "print('begun')")
    os.close(go_ahead)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("", 1)


def test_a_missing_program_is_named() -> None:
    process, go_ahead = behind_barrier("/nowhere/program")
    os.write(go_ahead, b"+")
    os.close(go_ahead)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 127
    assert "/nowhere/program cannot be started" in error
