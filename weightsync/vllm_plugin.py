"""The plugin that vLLM loads: weight-transfer backend, norms on a CPU, and the end of vLLM's processes when their owner dies.

vLLM calls `register` in the front end and in every spawned worker (entry point ``vllm.general_plugins``). Forked
workers inherit what the front end registered.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BACKEND = "sluice"
"""Name of the weight-transfer backend in vLLM's factory."""

WORKER_EXTENSION = "weightsync.vllm.worker.WorkerExtension"
"""Class that vLLM mixes into its workers; see `weightsync.vllm.worker`."""

CPU_KERNELS = "sluice_cpu"
"""Name under which vLLM finds the kernels of `weightsync.vllm.cpu_norms`."""

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h

_forking = threading.local()
_registered = threading.Lock()


def register() -> None:
    """Register our additions to vLLM, and make this process end when the engine's owner dies. Idempotent and cheap."""
    if not _registered.acquire(blocking=False):
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: PLC0415 - only under vLLM

    WeightTransferEngineFactory.register_engine(BACKEND, "weightsync.vllm.worker", "StagedFileEngine")
    from vllm.platforms import current_platform  # noqa: PLC0415 - only under vLLM

    if current_platform.is_cpu():
        from weightsync.vllm import cpu_norms  # noqa: PLC0415 - only under vLLM

        cpu_norms.register(CPU_KERNELS)
    os.register_at_fork(after_in_child=_after_fork)
    if multiprocessing.parent_process() is not None:
        _forking.tied = True  # a spawned engine process: its own workers are tied to it
        _die_with_parent()


@contextmanager
def children_die_with_us() -> Iterator[None]:
    """Tie processes forked in this block to the calling thread: they are killed when it ends, however it ends.

    Only the forks of this thread are tied, so that other users of fork in the process are not affected. The kernel
    watches the *thread* that forked: it must live as long as the children should live.
    """
    _forking.tied = True
    try:
        yield
    finally:
        _forking.tied = False


def _after_fork() -> None:
    """Tie a forked child to its parent if the block was active in the forking thread; the child's own children are tied, too."""
    if getattr(_forking, "tied", False):
        _die_with_parent()
        # The child also inherited the event loop's wake-up socket: a SIGTERM to this child would be written to it, and
        # the parent's loop would take the signal for its own.
        signal.set_wakeup_fd(-1)


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies, because a killed parent cannot stop its children itself."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() == 1:  # the parent died before this request, so no signal will come
        os._exit(1)
