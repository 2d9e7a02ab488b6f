"""A child begins once its parent has noted it, and not at all if the parent is gone."""

from __future__ import annotations

import os
import subprocess
import sys

from sluice.cli import gate


def behind_gate(*argv: str) -> tuple[subprocess.Popen[str], int]:
    gate_end, our_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", gate.__file__, str(gate_end), *argv],
            pass_fds=[gate_end],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(gate_end)
    return process, our_end


def test_the_program_runs_in_the_same_process_after_the_word() -> None:
    process, our_end = behind_gate(sys.executable, "-c", "import os; print(os.getpid())")
    assert process.poll() is None
    os.write(our_end, b"+")
    os.close(our_end)
    output, _ = process.communicate(timeout=30)
    assert (int(output), process.returncode) == (process.pid, 0)


def test_the_program_never_begins_where_the_parent_is_gone() -> None:
    process, our_end = behind_gate(sys.executable, "-c", "print('begun')")
    os.close(our_end)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("", 1)


def test_a_program_that_is_not_there_is_named() -> None:
    process, our_end = behind_gate("/nowhere/program")
    os.write(our_end, b"+")
    os.close(our_end)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 127
    assert "/nowhere/program cannot be started" in error
