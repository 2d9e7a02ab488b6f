"""The ranks of a trainer on this machine, and how they join those of other machines; `sluice ranks` starts them.

The launcher is torchrun's, with three differences. It ends with the exit code or signal of the first rank that failed, so that the
supervisor learns why. It does not restart ranks: the supervisor restarts the whole service. And its nodes find each other by
`node_rendezvous`.
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.supervise.node_rendezvous import Nodes

LAUNCHER = "SLUICE_INTERNAL_LAUNCHER"
"""Variable in which the launcher passes its process id to its ranks."""

_PR_SET_PDEATHSIG = 1
"""Linux: the signal that the kernel sends to this process when its parent ends (prctl(2))."""

_POLL_S = 0.5


def launch(processes: int, grace_s: float, nodes: Nodes, words: list[str]) -> int:
    """Run a `sluice` command in several processes until all have ended.

    A signal ends them; after `grace_s` seconds they are killed.

    Args:
        processes: Processes on this node.
        grace_s: Seconds for them to end.
        nodes: The nodes on which such processes run.
        words: The command.

    Returns:
        0 if all ended well, 128 and the signal's number after a signal to this process, otherwise the exit code of the rank that failed
        first.

    Raises:
        NodesMissingError: if a node did not join, or is gone.
    """
    # Loads PyTorch, which the rest of the command line does without.
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    from sluice.supervise.node_rendezvous import BACKEND, NodeRendezvous  # noqa: PLC0415

    rendezvous_handler_registry.register(BACKEND, lambda given: NodeRendezvous(nodes, given.run_id))
    os.environ[LAUNCHER] = str(os.getpid())
    if nodes.count > 1 and (interface := nodes.interface()):
        # gloo takes the interface of the host's name otherwise, which need not be the one that reaches the other nodes.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        # Ranks leave the reason of a failure here. Without a directory of our own PyTorch leaves one behind at every start.
        with tempfile.TemporaryDirectory(prefix="sluice-ranks-") as scratch:
            config = LaunchConfig(
                min_nodes=nodes.count,
                max_nodes=nodes.count,
                nproc_per_node=processes,
                logs_specs=DefaultLogsSpecs(log_dir=scratch),
                run_id="ranks",
                rdzv_backend=BACKEND,
                rdzv_endpoint=str(nodes),
                local_addr=nodes.host,
                max_restarts=0,
                shutdown_timeout=math.ceil(grace_s),
            )
            elastic_launch(config, sys.executable)("-m", "sluice.cli.main", *words)
    except SignalException as ended:
        return 128 + int(ended.sigval)
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
