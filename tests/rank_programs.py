"""Ranks and other programs of tests, forked from one process that has imported PyTorch: an import takes seconds of a core, and a test
starts up to four.

Run as a program this is that process. It reads one JSON object a line: ``{"start": {...}}`` forks a rank and answers its process
id; ``{"pid": ..., "code": ...}`` reports the end of a rank. At the end of its input it kills the ranks that are left.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

POLL_S = 0.02
START_S = 300.0
"""Real seconds for a process to import PyTorch; only a broken one takes them."""
END_S = 60.0
"""The same for one to end that was killed."""
TESTS = Path(__file__).parent


class Rank:
    """A forked rank; the calls are those of `subprocess.Popen`."""

    def __init__(self, programs: RankPrograms, pid: int) -> None:
        self._programs, self.pid = programs, pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal's number; None while it runs."""
        return self._programs.codes.get(self.pid)

    def wait(self, timeout: float) -> int:
        """Return the exit code.

        Raises:
            TimeoutError: if the rank does not end in time.
        """
        with self._programs.changed:
            if not self._programs.changed.wait_for(lambda: self.pid in self._programs.codes, timeout):
                raise TimeoutError(f"rank {self.pid} did not end within {timeout:g} s")
        return self._programs.codes[self.pid]

    def kill(self) -> None:
        """Kill the rank if it still runs."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class RankPrograms:
    """Starts ranks. One for all tests of a process."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "0"}
        environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS / "unit"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.codes: dict[int, int] = {}
        self.changed = threading.Condition()
        self._started: list[int] = []
        threading.Thread(target=self._read, name="rank-programs", daemon=True).start()

    def start(self, module: str, *arguments: str, environment: Mapping[str, str], output: Path | None = None) -> Rank:
        """Fork a rank that runs ``main()`` of a module, one of the tests or ``sluice.cli.main``; what it returns is the exit code.

        Args:
            module: Its name.
            arguments: Its command line.
            environment: Variables over our own.
            output: File for its output; None leaves it ours.
        """
        request = {
            "module": module,
            "arguments": arguments,
            "environment": os.environ | environment,
            "output": None if output is None else str(output),
            "directory": str(Path.cwd()),
        }
        assert self._process.stdin is not None
        with self.changed:
            self._process.stdin.write(json.dumps({"start": request}) + "\n")
            self._process.stdin.flush()
            assert self.changed.wait_for(lambda: self._started, START_S), "the process that forks ranks does not answer"
            return Rank(self, self._started.pop())

    @contextmanager
    def group(
        self, count: int, module: str, *arguments: str, outputs: Sequence[Path] | None = None
    ) -> Iterator[list[Rank]]:
        """Fork ranks that find each other. At the end, kill the ranks that are left.

        They meet at a store that this process holds, as torchrun's agent does, so that no rank chooses a port that another program may take.

        Args:
            count: Number of ranks.
            module: The module, as for `start`.
            arguments: Its command line, the same for all ranks.
            outputs: A file for the output of each rank; None: they write to our output.
        """
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        ranks: list[Rank] = []
        try:
            for rank in range(count):
                output = None if outputs is None else outputs[rank]
                ranks.append(self.start(module, *arguments, environment=shared | {"RANK": str(rank)}, output=output))
            yield ranks
        finally:
            for each in ranks:
                each.kill()
            for each in ranks:
                each.wait(END_S)

    def close(self) -> None:
        """End the process, and the ranks that are left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(2 * END_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self.changed:
                if "code" in answer:
                    self.codes[answer["pid"]] = answer["code"]
                else:
                    self._started.append(answer["pid"])
                self.changed.notify_all()


def run(request: Mapping[str, Any]) -> int:
    """Run a program in a forked process; return its exit code."""
    if request["output"] is not None:
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
    else:
        os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    try:
        ended = importlib.import_module(request["module"]).main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what the interpreter does with an exception of a program
        sys.excepthook(*sys.exc_info())
        return 1
    return ended if isinstance(ended, int) else 0


def fork(request: Mapping[str, Any]) -> None:
    """Fork a rank and report its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = run(request)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    ranks.add(pid)
    print(json.dumps({"pid": pid}), flush=True)


def report_ended() -> None:
    """Report the ranks that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)
        ranks.discard(pid)


ranks: set[int] = set()


def serve() -> None:
    """Fork ranks until the input ends."""
    import trainer_svc.engine.engine  # noqa: F401 - with PyTorch and transformers, which start no thread
    from sluice.config import load_service

    for service in ("trainer", "rollout", "weightsync"):
        load_service(service)
    gc.collect()
    gc.freeze()  # or the collector of each rank writes to all pages, which are then copied
    rest = b""
    while True:
        ready, _, _ = select.select([0], [], [], POLL_S if ranks else None)
        report_ended()
        if not ready:
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            fork(json.loads(line)["start"])
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_S
    while ranks and time.monotonic() < deadline:
        report_ended()
        time.sleep(POLL_S)


if __name__ == "__main__":
    serve()
