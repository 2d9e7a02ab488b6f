"""The faults of a chaos run: which a seed draws, and that a cut connection is cut."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import psutil

from benchmarks import faults

REPLICAS = ("rollout-0", "rollout-1")
DEADLINE_S = 20.0

TALKER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[2]))) as connection:
    connection.sendall(b"hello")
    sys.exit(7 if connection.recv(1) == b"" else 8)
"""


def test_a_seed_draws_the_same_faults_and_another_one_others() -> None:
    one, again, other = (faults.draw_faults(seed, REPLICAS, kills=2, pairs=3, disk=True) for seed in (4, 4, 5))
    assert one == again != other


def test_every_child_is_killed_alone_and_two_at_a_time() -> None:
    drawn = faults.draw_faults(0, REPLICAS, kills=2, pairs=3, disk=True)
    kills = [each.victims for each in drawn if each.kind == "kill"]
    assert sorted(each for each in kills if len(each) == 1) == sorted(
        (name,) for name in (*faults.SERVICES, *REPLICAS) for _ in range(2)
    )
    assert sum(len(set(each)) == 2 for each in kills) == 3
    assert {"stop", "cut", "disk full"} < {each.kind for each in drawn}


async def test_a_cut_connection_ends_on_both_sides() -> None:
    closed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(5) == b"hello"
        said.set()
        assert await reader.read() == b""
        closed.set()
        writer.close()

    said = asyncio.Event()
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    victim = subprocess.Popen([sys.executable, "-c", TALKER, "trainer", str(port)])  # noqa: ASYNC220 - returns at once
    try:
        await asyncio.wait_for(said.wait(), DEADLINE_S)
        faults.cut(psutil.Process(), faults.Fault("cut", ("trainer",), 0.0, 0.0))
        await asyncio.wait_for(closed.wait(), DEADLINE_S)
        assert await asyncio.to_thread(victim.wait, DEADLINE_S) == 7
    finally:
        victim.kill()
        victim.wait()
        server.close()
