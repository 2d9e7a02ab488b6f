"""The `sluice` program: what it finds, what it imports, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from toy_service import install_toy

from sluice.cli.main import main
from sluice.config import SecurityConfig, ServerConfig
from sluice.rpc import RpcServer


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return install_toy(tmp_path / "site")


async def sluice(site: Path, *words: str, ends: bool = True, **variables: str):
    """Start the program with the toy service installed; wait for its end unless told otherwise."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.cli.main", *words),
        env={**environment, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    if not ends:
        return process
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


async def test_help_lists_commands_and_services_and_imports_none_of_them(site):
    program = (
        "import sys; from sluice.cli.main import main; code = main(['--help']);"
        "heavy = {'torch', 'vllm', 'transformers', 'grpc', 'toy_svc', 'trainer_svc', 'sluice.cli.rl'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    listed = {line.split()[0] for line in out.decode().splitlines() if line.startswith("  ")}
    assert {"rl", "init-model", "health", "toy", "trainer", "sft"} <= listed


@pytest.mark.slow
async def test_a_service_serves_until_sigterm_and_ends_with_code_zero(site):
    process = await sluice(site, "toy", "--server.port", "0", ends=False)
    target = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
    code, out, _ = await sluice(site, "health", target, "--service", "sluice.v1.ServerInfoService")
    assert (code, out) == (0, f"{target}: SERVING\n")
    process.send_signal(signal.SIGTERM)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert out == b"put away\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["toy", "--server.prot", "1"], "did you mean 'toy.server.port'"),
        (["toy", "--server.host", "0.0.0.0"], "refusing to listen on 0.0.0.0"),
        (["nonsense"], "no command 'nonsense'"),
        (["absent"], "not installed"),
    ],
)
async def test_wrong_settings_end_with_code_two_and_a_line_instead_of_a_traceback(site, words, message):
    code, _, err = await sluice(site, *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


async def test_a_port_that_is_taken_is_named_before_the_service_loads_anything(site):
    (site / "toy_svc" / "app.py").write_text("raise OSError('it was loaded')\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = await sluice(site, "toy", "--server.port", str(port))
    assert code == 4
    assert f"cannot listen on 127.0.0.1:{port}: another program does; end it, or set toy.server.port" in err


async def test_a_service_that_fails_ends_with_code_one_and_its_traceback_in_the_log(site):
    (site / "toy_svc" / "app.py").write_text(
        "from sluice.config import Service\nfrom toy_svc.config import ToyConfig\n"
        "async def serve(common, config):\n    raise OSError('the disk is full')\n"
        "SERVICE = Service('toy', ToyConfig, serve)\n"
    )
    code, _, err = await sluice(site, "toy")
    assert code == 1
    assert "the disk is full" in err


@pytest.mark.slow
@pytest.mark.parametrize(("error", "exit_code"), [("UnfinishedError", 143), ("FailedForGoodError", 3)])
async def test_the_exit_code_says_how_a_service_failed_to_finish(site, error, exit_code):
    (site / "toy_svc" / "app.py").write_text(
        f"from sluice.config import Service, {error}\nfrom toy_svc.config import ToyConfig\n"
        f"async def serve(common, config):\n    raise {error}('it ended at step 3 of 9')\n"
        "SERVICE = Service('toy', ToyConfig, serve)\n"
    )
    code, _, err = await sluice(site, "toy")
    assert code == exit_code
    assert "it ended at step 3 of 9" in err
    assert "Traceback" not in err


async def test_a_service_that_cancels_itself_counts_as_failed_not_as_stopped(site):
    (site / "toy_svc" / "app.py").write_text(
        "import asyncio\nfrom sluice.config import Service\nfrom toy_svc.config import ToyConfig\n"
        "async def serve(common, config):\n    raise asyncio.CancelledError\n"
        "SERVICE = Service('toy', ToyConfig, serve)\n"
    )
    code, _, err = await sluice(site, "toy")
    assert code == 1
    assert "without a signal" in err


@pytest.mark.slow
async def test_a_service_that_is_still_loading_stops_on_a_signal(site):
    (site / "toy_svc" / "app.py").write_text(
        "import asyncio\nfrom sluice.config import Service\nfrom toy_svc.config import ToyConfig\n"
        "async def serve(common, config):\n    print('loading', flush=True)\n    await asyncio.Event().wait()\n"
        "SERVICE = Service('toy', ToyConfig, serve)\n"
    )
    process = await sluice(site, "toy", ends=False)
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"loading\n"
    process.terminate()
    await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0


@pytest.mark.slow
async def test_a_thread_that_computes_while_its_service_is_stopped_does_not_abort_the_process(site):
    (site / "toy_svc" / "app.py").write_text(
        "import asyncio, atexit, threading, torch\nfrom sluice.config import Service\nfrom toy_svc.config import ToyConfig\n"
        "def load():\n    matrix = torch.ones(200, 200)\n    while True:\n        matrix @ matrix\n"
        "async def serve(common, config):\n    threading.Thread(target=load, daemon=True).start()\n"
        "    atexit.register(print, 'tidy')\n    print('loading', flush=True)\n    await asyncio.Event().wait()\n"
        "SERVICE = Service('toy', ToyConfig, serve)\n"
    )
    process = await sluice(site, "toy", ends=False, OMP_NUM_THREADS="1")
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"loading\n"
    process.terminate()
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out) == (0, b"tidy\n")
    assert b"terminate called" not in err


@pytest.mark.slow
async def test_the_metrics_port_is_served_beside_the_service_whatever_rank_its_pod_has(site):
    ports = ("--server.port", "0", "--server.metrics-port", "0")
    process = await sluice(site, "toy", *ports, ends=False, SLUICE_LOG_LEVEL="info", RANK="1")
    async with asyncio.timeout(60):
        while b"/metrics" not in (line := await process.stderr.readline()):
            assert line, "the service ended without serving metrics"
        assert await process.stdout.readline()
    process.terminate()
    await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0


@pytest.mark.slow
async def test_a_closed_pipe_on_stdout_causes_no_traceback(site):
    reading, writing = os.pipe()
    os.close(reading)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.cli.main", "toy", "--help"),
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=writing,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(writing)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert err == b""
    assert process.returncode == 1


async def test_health_fails_for_a_server_that_is_not_ready_or_not_there(capsys):
    server = RpcServer("toy", ServerConfig(), SecurityConfig())
    await server.set_serving(False)
    await server.start()
    assert await asyncio.to_thread(main, ["health", server.target]) == 1
    assert "NOT_SERVING" in capsys.readouterr().out
    await server.stop(0)
    assert await asyncio.to_thread(main, ["health", server.target, "--timeout", "2"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sluice 0.")


def test_the_reference_of_settings_can_be_checked_against_a_file(tmp_path, capsys):
    page = tmp_path / "configuration.md"
    assert main(["config", "docs", "--output", str(page), "--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert main(["config", "docs", "--output", str(page)]) == 0
    assert main(["config", "docs", "--output", str(page), "--check"]) == 0
    assert "`max_staleness`" in page.read_text()
