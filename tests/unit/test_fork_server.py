"""Services that are forked from a process that has imported them."""

import asyncio
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from simulated_clock import SimulatedClock
from supervised import UnhurriedClock, Witness, ending, eventually, gone, run, supervisor, wait_for

from sluice.cli import fork_server
from sluice.config.schema import SecurityConfig
from sluice.rpc.channel import wait_until_serving
from sluice.rpc.server import LOOPBACK
from sluice.supervise.fork_server import ForkServer
from sluice.supervise.supervisor import ChildSpec, ChildState, Ending, Outcome
from sluice.supervise.watchdog import Watchdog

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="services are forked on Linux only")

FORK_SERVER = (sys.executable, "-m", "sluice.cli.fork_server")
SAYS_WHETHER_SOUND = """
import gc, os, sys
from sluice.cli import fork_server
server = os.getpid()
code = fork_server.serve(sys.argv[1:])
if os.getpid() != server:
    from rollout_svc.engines.vllm.processes import fork_is_sound
    gc.unfreeze()  # what is frozen is not looked at
    print("sound" if fork_is_sound() else "not sound")
sys.exit(code)
"""
"""A fork server whose forks say whether they have objects of gRPC from it; those that they made themselves have gone with their end."""

SAYS_COLD = "import socket; socket.socket(fileno=0).sendall(b'cold\\n')"


def weightsync(tmp_path: Path) -> ChildSpec:
    """Return a service at a unix socket, which nobody else can take."""
    arguments = ("weightsync", "--output-dir", str(tmp_path), "--server.host", f"unix:{tmp_path}/socket")
    return ChildSpec(
        "weightsync",
        (sys.executable, "-m", "sluice.cli.main", *arguments),
        tmp_path / "weightsync.log",
        partial(wait_until_serving, arguments[-1], SecurityConfig()),
        fork_server=(*FORK_SERVER, *arguments),
    )


def processes_of(spec: ChildSpec) -> tuple[psutil.Process, psutil.Process]:
    """Return the fork server and the service."""
    # A process of another test may have ended and still be listed: it has no command.
    commands = {each: each.as_dict(["cmdline"], ad_value=[])["cmdline"] for each in psutil.Process().children()}
    (server,) = [each for each, command in commands.items() if command[1:] == [*spec.fork_server[1:]]]
    (service,) = server.children()
    return server, service


@pytest.mark.slow
async def test_the_output_and_the_exit_code_of_a_forked_process_arrive(tmp_path: Path) -> None:
    witness = Witness()
    prints = ChildSpec(
        "prints", ("/no/such/program",), tmp_path / "log", asyncio.Event().wait, {}, (*FORK_SERVER, "--version")
    )
    assert await run([prints], witness) == Outcome(
        Ending.FAILED,
        "prints",
        "ended with exit code 0, and it was restarted 3 times within 600 s",
        tuple(lines(witness)),
    )
    assert len(lines(witness)) == 4


def lines(witness: Witness) -> list[str]:
    return [line.text for _, line in witness.lines]


@pytest.mark.slow
async def test_a_killed_service_is_forked_again_and_survives_its_fork_server(tmp_path: Path) -> None:
    witness, stop, spec = Witness(), asyncio.Event(), weightsync(tmp_path)
    running = asyncio.create_task(supervisor([spec], witness).run(stop))
    await eventually(lambda: witness.count("weightsync", ChildState.SERVING) == 1)
    server, service = processes_of(spec)
    service.kill()
    await eventually(lambda: witness.count("weightsync", ChildState.SERVING) == 2)
    same, again = processes_of(spec)
    assert same == server
    assert again != service
    server.kill()
    await eventually(lambda: gone(server.pid))
    await ending(spec.wait_ready())
    again.kill()
    await eventually(lambda: witness.count("weightsync", ChildState.SERVING) == 3)
    other, last = processes_of(spec)
    assert other != server
    assert gone(again.pid)
    stop.set()
    assert (await ending(running)).ending is Ending.STOPPED
    assert gone(other.pid)
    assert gone(last.pid)
    told = [detail for _, state, detail in witness.states if state is ChildState.RESTARTING]
    assert told[0] == "ended with signal SIGKILL; restart 1 of 3 now"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
async def test_how_a_service_ended_is_known_although_its_fork_server_was_killed_first(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    spec = weightsync(tmp_path)
    watchdog = await Watchdog.start()
    async with ForkServer(spec.fork_server, os.environ, watchdog, 60.0, UnhurriedClock()) as forks:
        forked = await ending(forks.fork())
        assert forked is not None
        await ending(spec.wait_ready())
        server, service = processes_of(spec)
        server.kill()
        await eventually(lambda: gone(server.pid))
        service.send_signal(number)
        assert await ending(forked.wait()) == code
    await watchdog.stop()


@pytest.mark.slow
async def test_a_service_whose_port_is_taken_fails_so_that_the_run_can_choose_another(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = str(other.getsockname()[1])
        words = ("weightsync", "--output-dir", str(tmp_path), "--server.host", LOOPBACK, "--server.port", port)
        child = ChildSpec("c", ("no program",), tmp_path / "log", asyncio.Event().wait, {}, (*FORK_SERVER, *words))
        outcome = await run([child], Witness())
    assert (outcome.ending, outcome.cannot_bind) == (Ending.FAILED, True)
    assert outcome.reason == "ended with exit code 4, and it cannot listen at its address"
    assert f"cannot listen on {LOOPBACK}:{port}" in outcome.tail[-1]


async def test_where_forking_is_not_safe_the_service_is_executed(tmp_path: Path) -> None:
    witness = Witness()
    cold = (sys.executable, "-S", "-c", SAYS_COLD)
    child = ChildSpec(
        "child", (sys.executable, "-S", "-c", "print(1)"), tmp_path / "log", asyncio.Event().wait, fork_server=cold
    )
    assert (await run([child], witness, max_restarts=1)).ending is Ending.FAILED
    assert lines(witness) == ["1", "1"]


async def test_where_the_fork_server_dies_at_once_the_service_is_executed(tmp_path: Path) -> None:
    witness = Witness()
    child = ChildSpec(
        "child",
        (sys.executable, "-S", "-c", "print(1)"),
        tmp_path / "log",
        asyncio.Event().wait,
        fork_server=(sys.executable, "-S", "-c", "1/0"),
    )
    assert (await run([child], witness, max_restarts=1)).ending is Ending.FAILED
    assert lines(witness) == ["1", "1"]


async def test_where_the_fork_server_hangs_the_service_is_executed(tmp_path: Path) -> None:
    witness, clock = Witness(), SimulatedClock()
    child = ChildSpec(
        "child",
        (sys.executable, "-S", "-c", "print(1)"),
        tmp_path / "log",
        partial(asyncio.sleep, 0),
        fork_server=(sys.executable, "-S", "-c", "import time; time.sleep(600)"),
        start_s=30.0,
    )
    running = asyncio.create_task(run([child], witness, max_restarts=1, clock=clock))
    for starts in (1, 2):
        await eventually(lambda starts=starts: witness.count("child", ChildState.STARTING) == starts and clock.waits)
        await clock.advance(29.9)
        assert len(lines(witness)) == starts - 1
        await clock.advance(0.2)
    assert (await running).ending is Ending.FAILED
    assert lines(witness) == ["1", "1"]


@pytest.mark.slow
def test_a_sigkill_of_the_supervisor_ends_the_fork_server_and_the_service(tmp_path: Path) -> None:
    spec = weightsync(tmp_path)
    program = f"""
import asyncio
from pathlib import Path
from sluice.supervise.fork_server import ForkServer
from sluice.supervise.supervisor import ChildSpec, Supervisor
class Nobody:
    def on_line(self, child, line): pass
    def on_state(self, child, state, detail): pass
spec = ChildSpec("c", (), Path({str(tmp_path / "c.log")!r}), asyncio.Event().wait, fork_server={spec.fork_server!r})
asyncio.run(Supervisor([spec], Nobody()).run(asyncio.Event()))
"""
    supervisor = psutil.Popen([sys.executable, "-c", program])
    try:
        wait_for(lambda: len(supervisor.children(recursive=True)) == 3)
        below = supervisor.children(recursive=True)
    finally:
        supervisor.kill()
        supervisor.wait()
    wait_for(lambda: all(gone(each.pid) for each in below))


def test_an_open_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fork_server._driver_is_open()
    for device in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"):
        with monkeypatch.context() as opened:
            opened.setattr(Path, "readlink", lambda _, device=device: Path(device))
            assert fork_server._driver_is_open(), device
    with Path("/dev/zero").open("rb"):
        assert not fork_server._driver_is_open()


@pytest.mark.slow
@pytest.mark.parametrize(
    "service", ["trainer", "rollout", "orchestrator", "weightsync", "gateway", "envserver", "agents"]
)
async def test_every_service_can_be_forked(service: str, tmp_path: Path) -> None:
    """Its imports start no thread, open no device and make no object of gRPC: nothing runs that a fork could cut off.

    With wrong settings the fork ends before it does anything.
    """
    witness = Witness()
    arguments = (service, "--no-such-setting", "1")
    server = (sys.executable, "-c", SAYS_WHETHER_SOUND, *arguments)
    child = ChildSpec(service, ("/no/such/program",), tmp_path / "log", asyncio.Event().wait, {}, server)
    outcome = await run([child], witness)
    assert [line for line in lines(witness) if line in {"sound", "not sound"}] == ["sound"]
    assert outcome.reason == "ended with exit code 2, and its settings are wrong"
