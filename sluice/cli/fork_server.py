"""``python -m sluice.cli.fork_server SERVICE ARGUMENTS``: a process that has imported a service, and forks it for each start.

`sluice rl` starts its services through it. A restart then imports nothing: for the trainer, 4 of 5 seconds are imports. The fork server
has no threads, no connections and no state, reads no settings, and never opens a device. `sluice.supervise.fork_server` is the
supervisor's side.

Standard input is a socket. Each byte on it comes with three descriptors: the pipe for the output of the new process, its start
barrier, and a pipe for its exit code. The new process sends its process id, waits for one byte from the barrier, runs the service, and
writes its exit code to the pipe, where it can be read even if the fork server was killed. The server sends it as well when the process
has ended, negative for a signal. `cold` says that forking is not safe: an import started a thread, or opened a device.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
from pathlib import Path

from sluice.cli.main import main
from sluice.config import load_service

_DRIVERS = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")
"""Device files of CUDA, of CUDA on WSL, and of ROCm. A process that has one open has initialised a GPU, and its forks cannot use GPUs."""


def serve(arguments: list[str]) -> int:
    """Fork the service for each request, one after the other, until the supervisor closes the socket.

    Returns:
        The exit code of this process, or in a fork the exit code of the service.
    """
    control = socket.socket(fileno=os.dup(0))
    _replace(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise the import of numpy starts threads
    with contextlib.suppress(Exception):  # the service imports it again, and reports what is wrong in its own log
        load_service(arguments[0])
        importlib.import_module("sluice.config.sources")  # each fork reads its settings with it
    if len(list(Path("/proc/self/task").iterdir())) > 1 or _driver_is_open():
        control.sendall(b"cold\n")
        return 0
    # Otherwise the garbage collector of each fork would write to all pages, so that forks would no longer share them.
    gc.collect()
    gc.freeze()
    while True:
        request, descriptors = b"", list[int]()
        with contextlib.suppress(ConnectionError):
            request, descriptors, _, _ = socket.recv_fds(control, 1, 3)
        if not request:
            return 0
        child = os.fork()
        if not child:
            return _run(arguments, control, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ConnectionError):
            control.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _run(arguments: list[str], control: socket.socket, output: int, barrier: int, code: int) -> int:
    """Run the service in the process that was forked, in a session of its own."""
    os.setsid()
    with control:
        control.sendall(b"%d\n" % os.getpid())
    os.dup2(output, 1)
    _replace(output, 2)
    if not os.read(barrier, 1):  # the supervisor died before the watchdog knew of this process
        return 1
    os.close(barrier)
    os.set_inheritable(code, False)
    ended_with = 1  # after an exception
    try:
        ended_with = main(arguments)
    finally:
        with contextlib.suppress(BrokenPipeError):  # the supervisor died
            os.write(code, b"%d\n" % ended_with)
    return ended_with


def _replace(descriptor: int, standard: int) -> None:
    os.dup2(descriptor, standard)
    os.close(descriptor)


def _driver_is_open() -> bool:
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(entry.readlink()).startswith(_DRIVERS):
                    return True
    return False


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
