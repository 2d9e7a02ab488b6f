"""One step of a Slurm job: `python -m sluice.supervise.slurm_step JOB NODE STEP srun ...` runs `srun`, and ends as the step ended.

srun answers SIGTERM by killing its step. This program sends the step itself SIGTERM by `scancel`, so that the service drains. If a
step ends because its node is lost, Slurm takes up to `SlurmdTimeout` to notice, and then ends or requeues the job. This program waits for
that, since a step that is started on the same node before would fail. If Slurm does not start the step at all, for example while its
controller restarts or has not yet removed the steps of the job's last start, this program asks again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

POLL_S = 0.5

NODE_WAIT_S = 900.0
"""Seconds that Slurm gets to end the job of a node that does not answer. `SlurmdTimeout` is 300 s unless a cluster sets it."""

REFUSALS_S = 300.0
"""Seconds for which to retry a step that Slurm does not start."""

REFUSAL_S = 5.0
"""Seconds between two such attempts."""

_REFUSED = b"srun: error: Unable to "
"""Beginning of the line in which srun says that there will be no step."""

ANSWER_S = 20.0
"""Seconds that a program of Slurm gets to answer: it asks the controller, which may be busy."""

_SILENT = "*"
"""End of the state of a node that does not answer."""

_DOWN = ("down", "fail", "reboot", "power", "unknown")
"""Beginnings of the states of a node on which no step can start."""


def main(job: str, node: str, step: str, command: list[str]) -> int:
    """Run a step to its end.

    Args:
        job: The job, or the component of a heterogeneous job, that the step belongs to.
        node: The node that it runs on.
        step: Name of the step, unique in the job.
        command: ``srun`` and its words.

    Returns:
        The exit code of the step's program. If a signal ended that program, this process ends by the same signal.
    """
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    deadline = time.monotonic() + REFUSALS_S
    code, refused = _run(job, step, command, asked)
    while refused and not asked and time.monotonic() < deadline:
        _say(
            f"Slurm did not start the step: asking again in {REFUSAL_S:g} s, for {deadline - time.monotonic():.0f} s more"
        )
        time.sleep(REFUSAL_S)
        if not asked:
            code, refused = _run(job, step, command, asked)
    if code and not asked and (problem := _problem(node)):
        _say(f"the step ended with exit code {code}: {problem}; waiting until that is over, or Slurm ends the job")
        if not _wait_for(node, asked):
            return code
        _say(f"node {node} answers again")
        code = 128 + signal.SIGKILL
    return _end_alike(code)


def _run(job: str, step: str, command: list[str], asked: Sequence[int]) -> tuple[int, bool]:
    """Run `srun` to its end. Return its exit code, and whether Slurm refused to start the step."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)  # noqa: S603 - the words of our own plan
    refused = threading.Event()
    reader = threading.Thread(target=_copy, args=(process.stderr, refused), daemon=True)
    reader.start()
    drained = False
    while (code := _ended(process)) is None:
        if asked and not drained:
            drained = True
            if not _drain(job, step):
                process.terminate()  # the step has not started, so there is nothing to drain
    reader.join(POLL_S)
    return code, bool(code) and refused.is_set()


def _copy(lines: IO[bytes], refused: threading.Event) -> None:
    """Write each line to our own standard error, and note whether srun says that there will be no step."""
    for line in lines:
        if line.startswith(_REFUSED):
            refused.set()
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """Wait for a short time, and return the exit code of a process; None if it still runs."""
    try:
        return process.wait(timeout=POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _drain(job: str, step: str) -> bool:
    """Send a step SIGTERM. Return False if it has not started yet."""
    listed = _ask("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i %j")
    found = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [step]]
    for each in found:
        _ask("scancel", "--signal=TERM", each)
    return bool(found)


def _problem(node: str) -> str:
    """Return why no step can start on a node now, for people; empty if one can."""
    state = _ask("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T").partition("\n")[0].strip()
    if not state:
        return "Slurm does not answer"
    away = state.endswith(_SILENT) or state.startswith(_DOWN)
    return f"node {node} is {state.removesuffix(_SILENT)}, and does not answer" if away else ""


def _wait_for(node: str, asked: Sequence[int]) -> bool:
    """Wait until a node answers again. Return False at the deadline, or once this process is asked to end."""
    deadline = time.monotonic() + NODE_WAIT_S
    while not asked and time.monotonic() < deadline:
        time.sleep(POLL_S)
        if not _problem(node):
            return True
    return False


def _say(text: str) -> None:
    """Write a line to the log of the part."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _ask(*words: str) -> str:
    """Return what a program of Slurm prints; nothing if it fails or does not answer in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, check=False)  # noqa: S603
        return done.stdout
    return ""


def _end_alike(code: int) -> int:
    """Return a step's exit code; end this process by the same signal if one ended the step's program (128 + its number)."""
    number = code - 128
    if number in {signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
