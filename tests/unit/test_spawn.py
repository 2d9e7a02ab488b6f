"""Programs are started without a fork: gRPC's threads may run in the process that starts them."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import spawn_checks

from sluice.supervise.spawn import Spawned, reader_of
from sluice.supervise.watchdog import Watchdog

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("sluice", "agents_svc", "envserver_svc", "gateway_svc", "orchestrator_svc"),
    *("rollout_svc", "trainer_svc", "weightsync", "sluice_convert"),
)

FORKING = {
    "os.fork",
    "os.forkpty",
    "pty.fork",
    "pty.spawn",
    "preexec_fn",
    "process_group",  # of Popen, as the next three: they switch vfork off in some versions of Python
    "user",
    "group",
    "extra_groups",
    "create_subprocess_exec",  # uvloop forks for it
    "create_subprocess_shell",
    "subprocess_exec",
    "subprocess_shell",
    "get_context",
    "set_start_method",
    "ProcessPoolExecutor",
}
"""Names that fork the process, or let it fork; for keywords only in calls of `Popen` and `run`."""

KEYWORDS = {"preexec_fn", "process_group", "user", "group", "extra_groups"}

WORDS = {each.rpartition(".")[2] for each in FORKING - KEYWORDS} | {"subprocess."}
"""One of them stands in each file that has a name of `FORKING`."""

MAY_FORK = {
    "sluice/cli/fork_server.py": "os.fork"  # see test_every_service_can_be_forked
}
"""Where one of them stands, and why that is sound."""


def named(node: ast.AST) -> Iterator[str]:
    """Return the names of `FORKING` that a node of a program uses."""
    if isinstance(node, ast.Attribute):
        whole = f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else node.attr
        yield from {whole, node.attr} & (FORKING - KEYWORDS)
    elif isinstance(node, ast.alias):
        yield from {node.name} & FORKING
    elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess."):
        yield from {each.arg for each in node.keywords if each.arg} & KEYWORDS


def test_no_process_of_ours_forks_beside_grpc() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(word in path.read_text() for word in WORDS)
        for node in ast.walk(ast.parse(path.read_text()))
        for name in named(node)
    }
    assert found == set(MAY_FORK.items()), "start programs with sluice.supervise.watchdog or subprocess.run"


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [15, pytest.param(60, marks=pytest.mark.soak)])
def test_no_restart_of_an_environment_forks_or_dies_before_its_code_runs(restarts: int) -> None:
    done = subprocess.run(
        [sys.executable, spawn_checks.__file__, str(restarts)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["noticed"] == 1
    assert found["forks"] == 0
    by_its_code = "the environment's process ended with exit code 3 in messages of task t"
    assert found["ends"] == {by_its_code: restarts, "others": 0}


async def test_the_output_and_the_exit_code_of_a_program_arrive() -> None:
    ours, theirs = os.pipe()
    output = await reader_of(ours)
    program = [sys.executable, "-c", "import os, sys; print(os.getsid(0) == os.getpid()); sys.exit(7)"]
    spawned = Spawned(program, stdout=theirs, output=output)
    os.close(theirs)
    assert await spawned.wait() == 7
    assert (await output.read(), spawned.returncode) == (b"True\n", 7)
    spawned.kill()  # does nothing: its number may be another process's
    assert await spawned.wait() == 7


async def test_a_signal_that_ends_a_program_is_known() -> None:
    spawned = Spawned([sys.executable, "-c", "import time; time.sleep(3600)"])
    waits = [asyncio.create_task(spawned.wait()) for _ in range(2)]
    assert spawned.returncode is None
    spawned.send_signal(signal.SIGKILL)
    assert await asyncio.gather(*waits) == [-signal.SIGKILL] * 2


async def test_a_program_that_cannot_be_started_leaves_no_descriptor() -> None:
    def open_ones() -> set[str]:
        return {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}

    watchdog = await Watchdog.start()
    before = open_ones()  # files that another test left open may be closed meanwhile
    with pytest.raises(FileNotFoundError):
        await watchdog.start_child(["/no/such/program"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert not open_ones() - before
    spawned = await watchdog.start_child([sys.executable, "-c", ""], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert spawned.stdout is not None
    assert (await spawned.stdout.read(), await spawned.wait()) == (b"", 0)
    await asyncio.sleep(0)  # the stream closes its end
    assert not open_ones() - before
    await watchdog.stop()
