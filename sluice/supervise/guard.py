"""Two small programs that keep children from outliving a supervisor that was killed.

``guard.py start FD PROGRAM ...`` is the start barrier of a child: it waits for one byte on FD, then executes the program in its own
process. It exits if the pipe closes first: then the supervisor died before it told the watchdog about the child.

``guard.py watch GRACE`` is the watchdog. It reads ``+<group>`` and ``-<group>`` lines, the process groups that started and ended. At
the end of its input the supervisor is gone. It then sends SIGTERM to the leader of each group that is left, and SIGKILL to the whole
group after GRACE seconds. Unlike PR_SET_PDEATHSIG this reaches grandchildren, such as vLLM's engine, and works outside of Linux.

The file imports nothing of Sluice, so that ``python -I -S guard.py`` starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

POLL_S = 0.05


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


def watch(lines: Iterable[str], grace_s: float) -> None:
    """Follow the supervisor's lines to their end, then end the process groups that are left.

    Args:
        lines: ``+<group>`` or ``-<group>``.
        grace_s: Seconds between SIGTERM and SIGKILL.
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
    watch(sys.stdin, float(first))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
