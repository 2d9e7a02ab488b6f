"""Code in the sandbox computes and prints, and does nothing else: as this user, and as one without rights."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from sandbox_escapes import COMPUTING, ESCAPES, GROUPS, IN_ONE, NAMES, WAITING

from sluice.environments import sandbox, sandbox_child
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
    """Files, servers, sockets and memory that anybody may reach who is not confined."""
    directory, library = tmp_path_factory.mktemp("targets"), tmp_path_factory.mktemp("library")
    for each in (directory, library, directory.parent, directory.parent.parent):
        each.chmod(0o755)
    victim, link, unix, datagram = (directory / name for name in ("victim", "link", "socket", "datagram"))
    readable = library / "module.py"
    for each in (victim, readable):
        each.write_text("precious")
        each.chmod(0o666)
    link.symlink_to(victim)
    libc = ctypes.CDLL(None)
    memory = libc.shmget(0, 4096, 0o1666)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as letters,
        pytest.MonkeyPatch.context() as patch,
    ):
        for path, server in ((unix, local), (datagram, letters)):
            server.bind(str(path))
            path.chmod(0o777)
        local.listen()
        patch.setattr(sandbox, "_READABLE", (*sandbox._READABLE, str(library)))
        places = {"victim": victim, "link": link, "readable": readable, "unix": unix, "datagram": datagram}
        yield {
            **{name: str(place) for name, place in places.items()},
            "port": tcp.getsockname()[1],
            "user": os.getuid() != 0,
            "memory": memory,
        }
    assert (victim.read_text(), readable.read_text()) == ("precious", "precious")
    assert memory < 0 or libc.shmctl(memory, 0, None) == 0, "it is there until we remove it"


@pytest.fixture
def readable() -> Iterator[Path]:
    """Our code where everybody may read it: the checkout may lie in a folder of this user alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(ROOT / "sluice", folder / "sluice", ignore=shutil.ignore_patterns("examples", "proto", "*.pyc"))
        shutil.copy(ROOT / "tests/unit/sandbox_escapes.py", folder)
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("what", ESCAPES)
def test_code_cannot(what: str, targets: dict[str, object]) -> None:
    ran = run_python(ESCAPES[what].format(**targets), limits=SOON if what in WAITING else LIMITS)
    assert "ESCAPED" not in ran.stdout
    assert not ran.ok or not ran.stdout.strip(), "what ends in order did nothing"
    if what in WAITING | COMPUTING:
        assert (ran.stopped, ran.ok) == (Stopped.TIME, False)
    if what == "print without end":
        assert ran.stopped is Stopped.OUTPUT


@pytest.mark.slow
@pytest.mark.timeout(1000)  # fifty interpreters, one after the other
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become an ordinary user")
@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["together", "each"])
def test_code_of_an_ordinary_user_cannot_either(targets: dict[str, object], readable: Path, *, each: bool) -> None:
    """Run as that user, with the system's interpreter, because the user may be unable to reach the tests' interpreter.

    "together": one program tries all actions, without those that compute for a second, which end in the same way for every user.
    """
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"{SYSTEM_PYTHON} is not there")
    programs = {what: code.format(**targets | {"user": True}) for what, code in ESCAPES.items()}
    if not each:
        together = {what: programs.pop(what) for group in IN_ONE for what in GROUPS[group]}
        programs = {what: code for what, code in programs.items() if what not in COMPUTING} | {"all": trying(together)}
    program = f"""
import json, sys
sys.path[:0] = [{str(readable)!r}]
from sandbox_escapes import WAITING
from sluice.environments import sandbox, sandbox_child
from sluice.environments.sandbox import Limits, run_python
sandbox._READABLE = {sandbox._READABLE!r}
limits, soon = Limits(**{asdict(LIMITS)!r}), Limits(**{asdict(SOON)!r})
ran = {{
    what: run_python(code, limits=soon if what in WAITING else limits) for what, code in {programs!r}.items()
}}
sane = run_python("print(6 * 7)", limits=limits)
print(json.dumps({{"escaped": [what for what, each in ran.items() if "ESCAPED" in each.stdout], "sane": sane.stdout, "all": not {each} and ran["all"].stdout}}))
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
    assert json.loads(done.stdout) == {"escaped": [], "sane": "42\n", "all": not each and "[]\n"}


KERNELS = {1: "5.13", 2: "5.19", 3: "6.2", 4: "6.7", 5: "6.10", 6: "6.12", 7: "6.15"}
"""The Linux that has each version of Landlock first."""

MEASURED = {**{group: GROUPS[group] for group in IN_ONE}, "names and attributes": NAMES}


def trying(attempts: dict[str, str]) -> str:
    """Return a program that tries all actions, and prints the names of those that succeeded."""
    return f"""
import contextlib, io, json
escaped = []
for what, code in {attempts!r}.items():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(BaseException):
        exec(code, {{}})
    if "ESCAPED" in said.getvalue():
        escaped.append(what)
print(json.dumps(escaped))
"""


def escaped(targets: dict[str, object]) -> set[str]:
    """Return what one program could do that tries everything of `MEASURED`."""
    attempts = {what: code.format(**targets) for group in MEASURED.values() for what, code in group.items()}
    ran = run_python(trying(attempts), limits=LIMITS)
    assert ran.ok, ran
    return set(json.loads(ran.stdout))


def stopped(found: set[str]) -> list[str]:
    """Return a column of the page's table."""
    return [f"{sum(what not in found for what in group)} of {len(group)}" for group in MEASURED.values()]


@pytest.fixture(scope="module")
def page() -> dict[str, list[str]]:
    """The columns of the table of versions in docs/rewards.md, by their heads."""
    lines = (ROOT / "docs/rewards.md").read_text().partition("| Landlock |")[2].split("\n\n")[0].split("\n")
    heads, _, *rows = [[each.strip() for each in line.split("|") if each.strip()] for line in lines]
    assert [row[0] for row in rows] == list(MEASURED)
    return {head: [row[column] for row in rows] for column, head in enumerate(heads, 1)}


@pytest.mark.parametrize("abi", KERNELS)
def test_every_version_of_landlock_stops_the_same(
    abi: int, targets: dict[str, object], page: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ruleset is the one that the kernels of that version get."""
    if abi > landlock_abi():
        pytest.skip(f"this kernel has Landlock {landlock_abi()}")
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: abi)
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: False)
    found = escaped(targets)
    assert found == set(NAMES), "names and attributes, as the page says"
    assert page[f"{abi} (Linux {KERNELS[abi]})"] == stopped(found)


def test_bubblewrap_alone_stops_all_of_it(
    targets: dict[str, object], page: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sandbox._bubblewrap():
        pytest.skip("bubblewrap is not there, or may not make namespaces")
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: 0)
    found = escaped(targets)
    assert not found
    assert page["none, bubblewrap"] == stopped(found)


def test_the_page_names_everything_that_was_tried() -> None:
    page = (ROOT / "docs/rewards.md").read_text()
    assert not [what for what in (*ESCAPES, *NAMES) if what not in page]


def test_code_that_is_not_confined_can_do_it(targets: dict[str, object]) -> None:
    """Otherwise the tests above would prove nothing."""
    for what in (
        "read a file of the machine",
        "take a lease on a file",
        "reach a server over TCP",
        "connect to a Unix socket",
        "send to a Unix socket from one end of a pair",
        "have the kernel signal a process (F_SETOWN)",
        "have the kernel signal a process (FIOSETOWN)",
        "move another process to one core",
        "outlive the process that started it",
        "fork",
        "send UDP",
        "start more threads than it may",
    ):
        ran = run_python(ESCAPES[what].format(**targets), limits=LIMITS, confined=False)
        assert "ESCAPED" in ran.stdout, f"{what}: {ran.stderr}"


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
OWN = 4711


def answer(steps: list[tuple[int, int, int, int]], architecture: int, number: int, arguments: Sequence[int]) -> int:
    """Run a filter on a call, as the kernel does (filter.h)."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    place, held = 0, 0
    while True:
        code, true, false, value = steps[place]
        place += 1
        if code == sandbox_child._LD_WORD:
            (held,) = struct.unpack_from("=I", data, value)
        elif code == sandbox_child._AND:
            held &= value
        elif code == sandbox_child._JUMP:
            place += value
        elif code == sandbox_child._RETURN:
            return value
        else:
            place += true if (held == value if code == sandbox_child._JEQ else held >= value) else false


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_of_each_machine_refuses_what_the_headers_of_the_kernel_call_so(machine: str) -> None:
    """Test both machines, also the one on which the tests do not run."""
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not there: install linux-libc-dev")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", HEADERS[machine].read_text(), re.MULTILINE)
    numbers = {name: int(number) for name, number in found}
    column, architecture = sandbox_child._MACHINES[machine]
    steps = sandbox_child._filter(column, architecture, OWN)
    assert all(max(true, false) < 256 for _, true, false, _ in steps)
    tables = {**sandbox_child._REFUSED, **sandbox_child._MISSING}
    assert {name: each[column] for name, each in tables.items()} == {name: numbers.get(name) for name in tables}
    eperm, eacces, enosys = (sandbox_child._ERRNO | each for each in (1, 13, 38))
    allow, ask, kill = sandbox_child._ALLOW, sandbox_child._ASK, sandbox_child._KILL
    expected = dict.fromkeys(sandbox_child._REFUSED, eperm) | dict.fromkeys(sandbox_child._MISSING, enosys)
    by_argument: dict[str, dict[tuple[int, ...], int]] = {
        "open": {
            (0, 0): allow,
            (0, os.O_CLOEXEC): allow,
            (0, 1): eacces,
            (0, 2): eacces,
            (0, 3): eacces,
            (0, os.O_TRUNC): eacces,
        },
        "openat": {(0, 0, 0): allow, (0, 0, os.O_CREAT): eacces, (0, 0, os.O_RDWR): eacces},
        "fcntl": {(0, 1030): allow, (0, 8): eperm, (0, 10): eperm, (0, 15): eperm, (0, 1024): eperm, (0, 6): eperm},
        "ioctl": {(0, 0x5421): allow, (0, 0x8901): eperm, (0, 0x5452): eperm},
        "socketpair": {(1, 1): allow, (1, 1 | os.O_CLOEXEC): allow, (1, 2): eperm, (1, 5): eperm, (2, 1): eperm},
        "kill": {(OWN,): allow, (0,): eperm, (1,): eperm, (2**32 - 1,): eperm},
        "tgkill": {(OWN, 9): allow, (1, 9): eperm},
        "prlimit64": {(0,): allow, (OWN,): allow, (1,): eperm},
        "sched_setaffinity": {(0,): allow, (OWN,): allow, (1,): eperm},
        "prctl": {(15,): allow, (1,): eperm, (4,): eperm, (62,): eperm},
        "clone": {(0x3D0F00,): ask, (17,): eperm, (0,): eperm},
    }
    for name, number in numbers.items():
        answers = by_argument.get(name, {(): enosys if number >= 447 else expected.get(name, allow)})
        for arguments, wanted in answers.items():
            assert answer(steps, architecture, number, arguments) == wanted, (name, arguments)
    assert [answer(steps, architecture, number, ()) for number in (447, 999, 0x40000029)] == [enosys, enosys, kill]
    assert answer(steps, 0x40000003, 1, ()) == kill, "the calls of a 32-bit program"


@pytest.mark.parametrize("bubblewrap", [False, True])
def test_a_program_has_as_many_threads_as_its_limits_say(bubblewrap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if bubblewrap and not sandbox._bubblewrap():
        pytest.skip("bubblewrap is not there, or may not make namespaces")
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: bubblewrap)
    program = """
import threading
threading.stack_size(1 << 16)
for _ in range(2):
    started, end = [threading.main_thread()], threading.Event()
    try:
        while True:
            thread = threading.Thread(target=end.wait)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        print(len(started), error)
    end.set()
    for each in started[1:]:
        each.join()
"""
    for limits in (LIMITS, replace(LIMITS, threads=3)):
        ran = run_python(program, limits=limits)
        first, second = ran.stdout.splitlines()
        assert (first, ran.ok) == (f"{limits.threads} can't start new thread", True), ran.stderr
        # A thread ends a moment after its join.
        assert 1 < int(second.split()[0]) <= limits.threads, "the threads of the first round have ended"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount /proc")
@pytest.mark.parametrize("bubblewrap", [False, True])
def test_threads_that_have_ended_do_not_count_where_proc_hides_processes(bubblewrap: bool, readable: Path) -> None:
    """As an ordinary user, in a mount namespace whose /proc has hidepid=2."""
    if not Path(SYSTEM_PYTHON).exists() or not shutil.which("setpriv"):
        pytest.skip(f"{SYSTEM_PYTHON} or setpriv is not there")
    mounted = ["unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh"]
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("/proc cannot be mounted here")
    program = f"""
import sys
sys.path[:0] = [{str(readable)!r}]
from sluice.environments import sandbox
from sluice.environments.sandbox import Limits, run_python
if {bubblewrap} and not sandbox._bubblewrap():
    sys.exit("no bubblewrap")
sandbox._bubblewrap = lambda: {bubblewrap}
ran = run_python('''
import threading
threading.stack_size(1 << 16)
for _ in range(40):
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
end, started = threading.Event(), 1
try:
    while True:
        threading.Thread(target=end.wait).start()
        started += 1
except RuntimeError:
    print(started <= 20)
end.set()
''', limits=Limits(wall_s=120.0, threads=20))
print(ran.stdout, ran.stderr)
"""
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", SYSTEM_PYTHON, "-I", "-c", program]
    # What this process preloads, that user may not read.
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([*mounted, *user], capture_output=True, text=True, timeout=240, check=False, env=variables)
    if "no bubblewrap" in done.stderr:
        pytest.skip("bubblewrap is not there, or may not make namespaces")
    assert (done.stdout.split(), done.stderr) == (["True"], "")


@pytest.mark.parametrize(
    ("code", "limits", "stopped"),
    [
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


def test_files_to_write_and_programs_are_refused_as_the_page_says() -> None:
    ran = run_python("import tempfile; tempfile.TemporaryFile()", limits=LIMITS)
    assert "FileNotFoundError: [Errno 2] No usable temporary directory" in ran.stderr
    assert "PermissionError" in run_python("import subprocess; subprocess.run(['true'])", limits=LIMITS).stderr


def test_much_input_that_nobody_reads_hangs_nothing() -> None:
    assert run_python("print(1)", stdin="x" * 5_000_000, limits=LIMITS).stdout == "1\n"
    assert (
        run_python("import sys; print(len(sys.stdin.read()))", stdin="x" * 3_000_000, limits=LIMITS).stdout
        == "3000000\n"
    )


@pytest.mark.slow
def test_code_that_closes_its_output_and_goes_on_is_stopped_in_time() -> None:
    ran = run_python("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(3600)", limits=SOON)
    assert (ran.ok, ran.stopped) == (False, Stopped.TIME)
    assert run_python("import os\nos.close(1)\nos.close(2)", limits=LIMITS).ok


def test_packages_can_be_allowed() -> None:
    assert "ModuleNotFoundError" in run_python("import numpy", limits=LIMITS).stderr
    program = "import numpy; print(int((numpy.ones((64, 64)) @ numpy.ones((64, 64))).sum()), numpy.__file__)"
    ran = run_python(program, limits=replace(LIMITS, packages=True, cpu_s=10.0))
    assert ran.stdout == f"{64**3} {np.__file__}\n", "the one that is installed beside Sluice"


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
    with pytest.raises(ConfigError, match=r'Linux 5\.13 .* bubblewrap.* Install it.* sandbox = "none"'):
        CodeReward()
    assert CodeReward(confined=False)("x = 1", "assert x == 1") == 1.0


@pytest.mark.slow
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
