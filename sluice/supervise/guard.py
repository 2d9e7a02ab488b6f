"""Two small programs that keep children from outliving a supervisor that was killed.

``guard.py start FD PROGRAM ...`` is the start barrier of a child: it waits for one byte on FD, then executes the program in its own
process. It exits if the pipe closes first: then the supervisor died before it told the watchdog about the child.

``guard.py watch GRACE [MARK]`` is the watchdog. It reads ``+<group>`` and ``-<group>`` lines, the process groups that started and ended. At
the end of its input the supervisor is gone. It then sends SIGTERM to the leader of each group that is left, and SIGKILL to the whole
group after GRACE seconds. Unlike PR_SET_PDEATHSIG this reaches grandchildren, such as vLLM's engine, and works outside of Linux.
With a MARK, such as ``NAME=beginning of a value``, it then kills every process that has such a variable, also in other sessions (Linux).

The file imports nothing of Sluice, so that ``python -I -S guard.py`` starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

POLL_S = 0.05

KILL_MARKED_S = 1.0
"""Seconds for which the search for marked processes is repeated, since these may start further processes meanwhile."""


def start(descriptor: int, argv: list[str]) -> int:
    """Wait for one byte from a pipe, then execute a program in this process.

    Returns:
        1 if the pipe was closed without a byte, 127 if the program cannot be executed, as in a shell.
    """
    if not os.read(descriptor, 1):
        return 1
    os.close(descriptor)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{argv[0]} cannot be started: {error}\n")
        return 127


def watch(lines: Iterable[str], grace_s: float, mark: str = "") -> None:
    """Follow the supervisor's lines to their end, then end the process groups and the marked processes that are left.

    Args:
        lines: ``+<group>`` or ``-<group>``.
        grace_s: Seconds between SIGTERM and SIGKILL.
        mark: Mark of processes to kill; see `kill_marked`. Empty: kill none.
    """
    groups: set[int] = set()
    for line in lines:
        sign, number = line[:1], int(line[1:])
        (groups.add if sign == "+" else groups.discard)(number)
    deadline = time.monotonic() + grace_s
    leaders = {group for group in groups if _signalled(os.kill, group, signal.SIGTERM)}
    while leaders and time.monotonic() < deadline:
        time.sleep(POLL_S)
        leaders = {group for group in leaders if _signalled(os.kill, group, 0)}
    for group in groups:
        _signalled(os.killpg, group, signal.SIGKILL)
    if mark:
        kill_marked(mark)


def kill_marked(mark: str) -> None:
    """Kill the processes of this user with an environment variable that begins with `mark`, until none is left. Only on Linux.

    Descendants have the variable even if their parent has ended or they have sessions of their own.

    Args:
        mark: ``NAME=beginning of its value``.
    """
    end = time.monotonic() + KILL_MARKED_S
    while sum(_kill_if_marked(int(name), mark.encode()) for name in _processes()) and time.monotonic() < end:
        time.sleep(POLL_S / 5)


def _processes() -> list[str]:
    try:
        return [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - pathlib is not loaded
    except OSError:
        return []


def _kill_if_marked(process: int, mark: bytes) -> bool:
    """Kill a process if it has the mark. It is killed by a handle, which unlike its number never refers to another process."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:  # noqa: PTH123 - pathlib is not loaded
            if not _has(file.read(), mark):
                return False
        handle = os.pidfd_open(process)
        try:
            with open(f"/proc/{process}/environ", "rb") as file:  # noqa: PTH123
                if not _has(file.read(), mark):
                    return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    except (OSError, AttributeError):  # it has ended, is another user's, or this is not Linux
        return False
    return True


def _has(variables: bytes, mark: bytes) -> bool:
    return variables.startswith(mark) or b"\0" + mark in variables


def _signalled(send: Callable[[int, int], None], target: int, number: int) -> bool:
    """Signal a process or a group. Return False if it does not exist."""
    try:
        send(target, number)
    except ProcessLookupError:
        return False
    return True


def main(mode: str, first: str, *argv: str) -> int:
    """Run one of the two programs."""
    if mode == "start":
        return start(int(first), list(argv))
    # Ctrl-C is the supervisor's to handle; it closes the input when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(sys.stdin, float(first), *argv)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
