"""Restarts the process of an environment beside gRPC calls, on the event loop of the services; for test_spawn.py.

As a program, with a number of restarts: prints a JSON object of how the processes ended ("ends"), how often this process forked ("forks"),
and how often a fork was noticed that was made to prove that they are ("noticed").
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path

import grpc
import structlog

from sluice.environments.base import Task
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.worker import EnvironmentFailedError

ENVIRONMENT = f"{Path(__file__).with_name('misbehaving_environment.py')}:Single"
LIMIT_S = 900.0
PAUSE_S = 0.002
"""Between two calls of gRPC: the processes of the environment need the cores, too."""

METHOD = "/a/b"

_forks = 0


@ctypes.CFUNCTYPE(None)
def _note_fork() -> None:
    """Run before each fork of this process, by glibc; not by vfork."""
    global _forks  # noqa: PLW0603 - a handler of the C library has no other place
    _forks += 1


def notice_forks() -> int:
    """Begin to count forks; return how many of one that is made here are noticed."""
    ctypes.CDLL(None)["__register_atfork"](_note_fork, None, None, None)
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    return _forks


class Echo(grpc.GenericRpcHandler):
    """Answers with the request."""

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def echo(request: bytes, _context: object) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


async def restart(times: int) -> dict[str, int]:
    """Let calls end their process so often, while other calls of gRPC run; return how the processes ended."""
    ends: Counter[str] = Counter()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    config = EnvironmentProcessesConfig(count=1, max_restarts=10 * times, call_s=LIMIT_S)
    over = threading.Event()

    async def call() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            while not over.is_set():
                await channel.unary_unary(METHOD)(b"x")
                await asyncio.sleep(PAUSE_S)

    def call_from_a_thread() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            while not over.wait(PAUSE_S):
                channel.unary_unary(METHOD)(b"x")

    calls = [asyncio.create_task(call()), asyncio.create_task(asyncio.to_thread(call_from_a_thread))]
    try:
        async with EnvironmentProcesses(ENVIRONMENT, {}, config, (LIMIT_S, "start_s")) as environment:
            while ends.total() < times:
                try:
                    await environment.messages(Task("t", {"do": "exit"}))
                except EnvironmentFailedError as error:
                    ends[error.message] += 1
            ends["others"] = environment.processes_ended.total() - times
    finally:
        over.set()
        await asyncio.gather(*calls)
        await server.stop(0)
    return dict(ends)


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    noticed = notice_forks()
    new_loop = importlib.import_module("uvloop").new_event_loop if importlib.util.find_spec("uvloop") else None
    with asyncio.Runner(loop_factory=new_loop) as runner:
        ends = runner.run(restart(int(sys.argv[1])))
    print(json.dumps({"ends": ends, "forks": _forks - noticed, "noticed": noticed}))


if __name__ == "__main__":
    main()
