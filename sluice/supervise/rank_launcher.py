"""The ranks of one service on this machine: `python -m sluice.supervise.rank_launcher 4 6 trainer @ rl.toml` starts four of them.

The launcher is torchrun's, with two differences. It ends as its first failed rank ended, so that the supervisor learns why. And it
does not restart ranks: the supervisor restarts the whole service.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import tempfile
import threading
import time
import uuid

LOOPBACK = "127.0.0.1"

LAUNCHER = "SLUICE_INTERNAL_LAUNCHER"
"""Variable in which the launcher passes its process id to its ranks."""

_PR_SET_PDEATHSIG = 1
"""Linux: the signal that the kernel sends to this process when its parent ends (prctl(2))."""

_POLL_S = 0.5


def main(processes: int, grace_s: float, words: list[str]) -> int:
    """Run a `sluice` command in several processes until all have ended.

    A signal ends them; after `grace_s` seconds they are killed.

    Returns:
        0 if all ended well or after a signal to this process, otherwise the exit code of the rank that failed first.
    """
    # Loads PyTorch, which the rest of the command line does without.
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    os.environ[LAUNCHER] = str(os.getpid())
    try:
        # Ranks leave the reason of a failure here. Without a directory of our own PyTorch leaves one behind at every start.
        with tempfile.TemporaryDirectory(prefix="sluice-ranks-") as scratch:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=processes,
                logs_specs=DefaultLogsSpecs(log_dir=scratch),
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr=LOOPBACK,
                max_restarts=0,
                shutdown_timeout=math.ceil(grace_s),
            )
            elastic_launch(config, sys.executable)("-m", "sluice.cli.main", *words)
    except SignalException:
        return 0
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return _end_alike(failure.exitcode)
    return 0


def _end_alike(code: int) -> int:
    """Return a rank's exit code; end this process by the same signal if a signal ended the rank, as shells do."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return abs(code)


def end_with_launcher() -> None:
    """Make this rank end by SIGKILL when its launcher does.

    torchrun starts each rank in a session of its own, so a signal to the launcher's process group does not reach the ranks. A
    rank that stayed would keep its device and its port, and it has nothing to save.

    Outside of Linux a thread polls the parent; native code that holds Python's lock can delay it.
    """
    expected = os.environ.get(LAUNCHER)
    parent = int(expected) if expected else os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), name="launcher", daemon=True).start()
    if os.getppid() != parent:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
