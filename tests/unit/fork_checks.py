"""When an engine's process may be forked: checks for test_forking.py, in a process that has used gRPC for nothing else.

As a program: runs all of them, and prints a JSON object that has what failed by the name of the check.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import signal
import traceback
from collections.abc import Callable

import grpc

from rollout_svc.engines.vllm.processes import collect_rpc_garbage, fork_is_sound, garbage_stays_behind

DEADLINE_S = 60.0
TARGET = "127.0.0.1:1"


def aio_call() -> object:
    """A call that outlives its channel and its stub."""
    return grpc.aio.insecure_channel(TARGET).unary_unary("/a/b")(b"")


PARTS: dict[str, Callable[[], object]] = {
    "server": grpc.aio.server,
    "channel": lambda: grpc.aio.insecure_channel(TARGET),
    "stub": lambda: grpc.aio.insecure_channel(TARGET).unary_unary("/a/b"),
    "call": aio_call,
    "plain channel": lambda: grpc.insecure_channel(TARGET),
    "plain stub": lambda: grpc.insecure_channel(TARGET).unary_unary("/a/b"),
    "plain server": lambda: grpc.server(None),
}


def no_fork_while(part: str) -> None:
    """A part of gRPC lives."""

    async def check() -> None:
        made = PARTS[part]()
        collect_rpc_garbage()
        assert not fork_is_sound()
        if hasattr(made, "cancel"):
            made.cancel()
        del made

    asyncio.run(check())


async def used_and_left_in_a_cycle() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    await channel.channel_ready()
    await channel.close()
    await server.stop(0)
    cycle: list[object] = [server, channel]
    cycle.append(cycle)


def ends_in_a_child() -> bool:
    """Whether a forked child gets through its garbage collection."""
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    handle = os.pidfd_open(child)
    ended, _, _ = select.select([handle], [], [], DEADLINE_S)
    os.close(handle)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return bool(ended)


def garbage_of_grpc_is_not_inherited() -> None:
    async def check() -> None:
        await used_and_left_in_a_cycle()
        assert not fork_is_sound()
        collect_rpc_garbage()
        assert fork_is_sound()
        assert ends_in_a_child()

    gc.disable()
    try:
        asyncio.run(check())
    finally:
        gc.enable()


class Tells:
    """Garbage that says when it is collected."""

    def __init__(self, told: list[int]) -> None:
        self.itself = self
        self.told = told

    def __del__(self) -> None:
        self.told.append(os.getpid())


def collected_by_child(told: list[int]) -> int:
    """How many pieces of garbage a forked child finds."""
    child = os.fork()
    if child == 0:
        gc.unfreeze()  # as vLLM does at its end
        gc.collect()
        os._exit(len(told))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def child_leaves_its_parents_garbage_alone() -> None:
    told: list[int] = []
    gc.disable()
    try:
        Tells(told)
        assert collected_by_child(told) == 1
        with garbage_stays_behind():
            assert collected_by_child(told) == 0
        gc.collect()
    finally:
        gc.enable()
    assert told == [os.getpid()]


def outcome(check: Callable[[], None]) -> str:
    """Return what failed; empty if nothing did."""
    collect_rpc_garbage()
    try:
        assert fork_is_sound()
        check()
    except Exception:  # noqa: BLE001 - the test shows it
        return traceback.format_exc()
    return ""


def main() -> None:
    found = {part: outcome(lambda part=part: no_fork_while(part)) for part in PARTS}
    checks = (garbage_of_grpc_is_not_inherited, child_leaves_its_parents_garbage_alone)
    print(json.dumps(found | {check.__name__: outcome(check) for check in checks}))


if __name__ == "__main__":
    main()
