"""When an engine's process may be forked."""

from __future__ import annotations

import gc
import os
import signal
import time

import grpc
import pytest

from rollout_svc.engines.vllm.processes import collect_rpc_garbage, fork_is_sound, garbage_stays_behind

DEADLINE_S = 5.0
TARGET = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def without_what_other_tests_left() -> None:
    collect_rpc_garbage()
    if not fork_is_sound():
        pytest.skip("another test's channel or server is still open")


def aio_call() -> object:
    """A call that outlives its channel and its stub."""
    return grpc.aio.insecure_channel(TARGET).unary_unary("/a/b")(b"")


@pytest.mark.parametrize(
    "make",
    [
        grpc.aio.server,
        lambda: grpc.aio.insecure_channel(TARGET),
        lambda: grpc.aio.insecure_channel(TARGET).unary_unary("/a/b"),
        aio_call,
        lambda: grpc.insecure_channel(TARGET),
        lambda: grpc.insecure_channel(TARGET).unary_unary("/a/b"),
        lambda: grpc.server(None),
    ],
    ids=["server", "channel", "stub", "call", "plain channel", "plain stub", "plain server"],
)
async def test_no_fork_while_something_of_grpc_lives(make):
    assert fork_is_sound()
    made = make()
    collect_rpc_garbage()
    assert not fork_is_sound()
    if hasattr(made, "cancel"):
        made.cancel()
    del made


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
    ends = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return True
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


async def test_the_garbage_of_grpc_is_not_inherited():
    gc.disable()
    try:
        await used_and_left_in_a_cycle()
        assert not fork_is_sound()
        collect_rpc_garbage()
        assert fork_is_sound()
        assert ends_in_a_child()
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
        gc.collect()
        os._exit(len(told))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_leaves_its_parents_garbage_alone() -> None:
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
