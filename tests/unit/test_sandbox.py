"""Code in the sandbox computes and prints, and does nothing else: as this user, and as one without rights."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from sandbox_escapes import COMPUTING, ESCAPES, WAITING

from sluice.environments import sandbox
from sluice.environments.rewards import CodeReward
from sluice.environments.sandbox import Limits, Stopped, run_python
from sluice.environments.sandbox_child import landlock_abi
from sluice.errors import ConfigError

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"
LIMITS = Limits(wall_s=120.0, cpu_s=1.0)
"""Programs that end by themselves take a hundredth of both, on a machine that does nothing else."""

SOON = Limits(wall_s=1.0)
"""For programs that wait until they are stopped."""

pytestmark = pytest.mark.skipif(landlock_abi() < 1, reason="this kernel has no Landlock")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """A file, a TCP server and a Unix socket that anybody may reach who is not confined."""
    directory = tmp_path_factory.mktemp("targets")
    for each in (directory, directory.parent, directory.parent.parent):
        each.chmod(0o755)
    victim, unix = directory / "victim", directory / "socket"
    victim.write_text("precious")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(unix))
        unix.chmod(0o777)
        local.listen()
        yield {"victim": str(victim), "unix": str(unix), "port": tcp.getsockname()[1], "user": os.getuid() != 0}
    assert victim.read_text() == "precious"


@pytest.fixture
def readable() -> Iterator[Path]:
    """Our code where everybody may read it: the checkout may lie in a folder of this user alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(ROOT / "sluice", folder / "sluice", ignore=shutil.ignore_patterns("examples", "proto", "*.pyc"))
        shutil.copy(ROOT / "tests/unit/sandbox_escapes.py", folder)
        yield folder


@pytest.mark.parametrize("what", ESCAPES)
def test_code_cannot(what: str, targets: dict[str, object]) -> None:
    ran = run_python(ESCAPES[what].format(**targets), limits=SOON if what in WAITING else LIMITS)
    assert "ESCAPED" not in ran.stdout
    assert not ran.ok or not ran.stdout.strip(), "what ends in order did nothing"
    if what in WAITING | COMPUTING:
        assert ran.stopped is Stopped.TIME
    if what == "print without end":
        assert ran.stopped is Stopped.OUTPUT


@pytest.mark.slow
@pytest.mark.timeout(1000)  # fifty interpreters, one after the other
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become an ordinary user")
def test_code_of_an_ordinary_user_cannot_either(targets: dict[str, object], readable: Path) -> None:
    """In one process of that user: the system's interpreter, since that of the tests may be out of its reach."""
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"{SYSTEM_PYTHON} is not there")
    program = f"""
import json, sys
sys.path[:0] = [{str(readable)!r}]
from sandbox_escapes import ESCAPES, WAITING
from sluice.environments.sandbox import Limits, run_python
targets = {targets | {"user": True}!r}
limits, soon = Limits(**{asdict(LIMITS)!r}), Limits(**{asdict(SOON)!r})
ran = {{
    what: run_python(code.format(**targets), limits=soon if what in WAITING else limits) for what, code in ESCAPES.items()
}}
sane = run_python("print(6 * 7)", limits=limits)
print(json.dumps({{"escaped": [what for what, each in ran.items() if "ESCAPED" in each.stdout], "sane": sane.stdout}}))
"""
    done = subprocess.run(
        [SYSTEM_PYTHON, "-I", "-c", program],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"escaped": [], "sane": "42\n"}


def test_the_page_names_everything_that_was_tried() -> None:
    page = (ROOT / "docs/rewards.md").read_text()
    assert not [what for what in ESCAPES if what not in page]


def test_code_that_is_not_confined_can_do_it(targets: dict[str, object]) -> None:
    """Otherwise the tests above would prove nothing."""
    for what in (
        "read a file of the machine",
        "reach a server over TCP",
        "connect to a Unix socket",
        "fork",
        "send UDP",
    ):
        ran = run_python(ESCAPES[what].format(**targets), limits=LIMITS, confined=False)
        assert "ESCAPED" in ran.stdout, f"{what}: {ran.stderr}"


@pytest.mark.parametrize(
    ("code", "limits", "stopped"),
    [
        ("while True: pass", LIMITS, Stopped.TIME),
        ("import time; time.sleep(3600)", SOON, Stopped.TIME),
        ("print('x' * 10_000_000)", LIMITS, Stopped.OUTPUT),
        ("import ctypes; ctypes.string_at(0)", LIMITS, Stopped.SIGNAL),
    ],
)
def test_it_says_why_code_was_stopped(code: str, limits: Limits, stopped: Stopped) -> None:
    ran = run_python(code, limits=limits)
    assert (ran.stopped, ran.ok) == (stopped, False)
    assert len(ran.stdout) <= limits.output_kib << 10


def test_ordinary_programs_work() -> None:
    code = """
import asyncio, collections, dataclasses, datetime, decimal, fractions, functools, heapq, itertools, json, math, random, re, statistics
import string, sys, threading, typing, unicodedata, zoneinfo

async def waits():
    await asyncio.sleep(0)
    return 1

found = []
thread = threading.Thread(target=found.append, args=(asyncio.run(waits()),))
thread.start(); thread.join()
print(found, input(), sys.argv, __name__, file=sys.stdout)
print("to errors", file=sys.stderr)
"""
    ran = run_python(code, stdin="read this\n", limits=LIMITS)
    assert (ran.stdout, ran.stderr) == ("[1] read this ['<code>'] __main__\n", "to errors\n")


def test_much_input_that_nobody_reads_hangs_nothing() -> None:
    assert run_python("print(1)", stdin="x" * 5_000_000, limits=LIMITS).stdout == "1\n"
    assert (
        run_python("import sys; print(len(sys.stdin.read()))", stdin="x" * 3_000_000, limits=LIMITS).stdout
        == "3000000\n"
    )


def test_code_that_closes_its_output_and_goes_on_is_stopped_in_time() -> None:
    ran = run_python("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(3600)", limits=SOON)
    assert (ran.ok, ran.stopped) == (False, Stopped.TIME)
    assert run_python("import os\nos.close(1)\nos.close(2)", limits=LIMITS).ok


def test_packages_can_be_allowed() -> None:
    limits = Limits(wall_s=120.0, memory_mib=4096)
    assert "ModuleNotFoundError" in run_python("import numpy", limits=limits).stderr
    allowed = Limits(wall_s=120.0, memory_mib=4096, packages=True)
    assert run_python("import numpy; print(int(numpy.arange(4).sum()))", limits=allowed).stdout == "6\n"


def test_several_run_side_by_side() -> None:
    found: dict[int, str] = {}

    def run(number: int) -> None:
        found[number] = run_python(f"print({number})", limits=LIMITS).stdout

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == {number: f"{number}\n" for number in range(8)}


def test_a_machine_that_cannot_confine_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: 0)
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: False)
    with pytest.raises(ConfigError, match='sandbox = "none"'):
        CodeReward()
    assert CodeReward(confined=False)("x = 1", "assert x == 1") == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("```python\ndef f(x):\n    return x + 1\n```", "assert f(1) == 2", 1.0),
        ("Think.\n```\nx = 1\n```\nBetter:\n```python\nx = 2\n```\nDone.", "assert x == 2", 1.0),
        ("def f(x): return x", "assert f(1) == 2", 0.0),
        ("import sys; sys.exit(0)", "assert False", 0.0),
        ("import os; os._exit(0)", "assert False", 0.0),
        ("not python at all", "assert True", 0.0),
        ("while True: pass", "assert True", 0.0),
        (
            "print(int(input()) * 2)",
            json.dumps([{"input": "2\n", "output": "4"}, {"input": "5", "output": "10\n"}]),
            1.0,
        ),
        ("print(4)", json.dumps([{"input": "2\n", "output": "4"}, {"input": "5", "output": "10\n"}]), 0.0),
    ],
)
def test_the_reward_of_a_program_is_one_if_it_passes_its_tests(completion: str, answer: str, reward: float) -> None:
    assert CodeReward({"wall_s": LIMITS.wall_s, "cpu_s": LIMITS.cpu_s})(completion, answer) == reward
