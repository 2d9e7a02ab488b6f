"""Ends the process groups of a supervisor that was killed: run as a script, fed through its standard input.

Each line is ``+<group>`` or ``-<group>``. The end of the input means that the supervisor is gone, however it went: what
is left is asked to drain (SIGTERM to the leader), and killed as a group after the grace. Unlike PR_SET_PDEATHSIG this reaches grandchildren (vLLM's engine is
one) and works outside of Linux. It imports nothing of Sluice, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

__all__ = ["main"]

POLL_S = 0.05


def main(lines: Iterable[str], grace_s: float) -> None:
    """Follow the supervisor's notes until they end, then end the groups that they leave.

    Args:
        lines: The notes.
        grace_s: Seconds between SIGTERM and SIGKILL.
    """
    groups: set[int] = set()
    for line in lines:
        sign, number = line[:1], int(line[1:])
        (groups.add if sign == "+" else groups.discard)(number)
    deadline = time.monotonic() + grace_s
    leaders = {group for group in groups if reached(os.kill, group, signal.SIGTERM)}
    while leaders and time.monotonic() < deadline:
        time.sleep(POLL_S)
        leaders = {group for group in leaders if reached(os.kill, group, 0)}
    for group in groups:
        reached(os.killpg, group, signal.SIGKILL)


def reached(send: Callable[[int, int], None], target: int, number: int) -> bool:
    """Signal a process or a group; False if there is none any more."""
    try:
        send(target, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    # A Ctrl-C is for the supervisor, which closes the input when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.stdin, float(sys.argv[1]))
