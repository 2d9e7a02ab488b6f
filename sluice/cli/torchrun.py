"""Runs the ranks of a service on this machine, by torchrun's launcher: `python -m sluice.cli.torchrun 4 trainer @ rl.toml`.

Unlike `torchrun` it ends as its first failed rank ended, so that whoever supervises it learns why. It does not restart
ranks: its supervisor restarts the whole.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import uuid

from sluice.cli.parent import LAUNCHER

__all__ = ["main"]

SHUTDOWN_S = 6
"""Seconds that ranks get to end before they are killed: one more than the default of `server.drain_s`."""

LOOPBACK = "127.0.0.1"


def main(processes: int, words: list[str]) -> int:
    """Run a `sluice` command in several processes, to the end of all.

    Args:
        processes: How many.
        words: The command and its arguments.

    Returns:
        0 if all ended well or were asked to end, otherwise the exit code of the one that failed first.
    """
    # It loads PyTorch, which the rest of the command line does without.
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    os.environ[LAUNCHER] = str(os.getpid())
    try:
        # Where ranks leave what failed them; without one of its own PyTorch leaves a directory behind for every start.
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
                shutdown_timeout=SHUTDOWN_S,
            )
            elastic_launch(config, sys.executable)("-m", "sluice.cli.main", *words)
    except SignalException:
        return 0
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return _end_alike(failure.exitcode)
    return 0


def _end_alike(code: int) -> int:
    """The exit code; a rank that a signal ended is followed by the same signal, as shells do."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return abs(code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
