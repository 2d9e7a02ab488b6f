"""A rank ends with the launcher that started it.

torchrun gives each rank a session of its own, so that whoever kills the launcher's process group does not reach them: a rank
must see to it by itself, or it would keep its device and its port.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

__all__ = ["LAUNCHER", "end_with_parent"]

LAUNCHER = "SLUICE_INTERNAL_LAUNCHER"
"""Variable in which our own launcher tells its ranks its process id."""

_PR_SET_PDEATHSIG = 1
"""Linux: the signal that the kernel sends to this process when its parent ends (prctl(2))."""

_POLL_S = 0.5


def end_with_parent() -> None:
    """End this process when its parent does, by SIGKILL: a rank without its launcher has nothing to put away.

    Elsewhere than on Linux a thread looks after the parent, which a kernel that holds Python's lock can delay.
    """
    expected = os.environ.get(LAUNCHER)
    parent = int(expected) if expected else os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
