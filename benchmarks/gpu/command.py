"""Run parts in a process of their own, one after another, each within a limit of time, and keep what they answer.

What a part could not do is said with its reason, in the file and in the table; it never counts as measured. This process imports
neither PyTorch nor vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.record import FAILED, MEASURED, Record, table
from sluice.config import ConfigError, Options, whole_number

LIMIT_S = 480
"""Seconds that a part may take. A machine with a device may be lent for half an hour."""

START_S = 120.0
"""Seconds until a process has imported PyTorch."""

LOOK_S = 2.0
"""Seconds after which a process that says nothing is looked at."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - by its Linux name; the directory in it is made for its owner alone
SHARED_ROOM = 16 << 30
"""Bytes that the files of the parts take at most, with some to spare: the model and some versions of it."""


def run(argv: list[str]) -> Mapping[str, Any]:
    """Run the parts that are due and print the table; return the content of the JSON line.

    Raises:
        ConfigError: if a part does not exist, or the file has figures of something else.
    """
    options = _parser().parse_args(argv)
    if options.list:
        print("\n".join(f"{number:>2}  {part.name:<14}{part.says}" for number, part in enumerate(PARTS, 1)))
        return {"parts": [part.name for part in PARTS]}
    record = Record.open(options.into, shape=options.shape, device=options.device)
    due = record.due([_part(word) for word in options.part])
    with _directory() as directory, contextlib.closing(Worker(options.device, options.shape, directory)) as worker:
        for part in due:
            print(f"part {PARTS.index(part) + 1}, {part.name}: {part.says}", flush=True)
            measure(part, record, worker, options.limit)
    print("\n".join(table(record.content)), flush=True)
    outcomes = {part.name: record.outcome(part) for part in PARTS}
    now = {part.name: outcomes[part.name] for part in due}
    wrong = [name for name, outcome in outcomes.items() if outcome == FAILED]
    if due and MEASURED not in now.values():
        wrong = list(now)  # nothing was measured: that is no success
    result: dict[str, Any] = {"ratios": {}, "into": str(options.into), "parts": outcomes}
    return result | ({"failures": wrong} if wrong else {})


def _parser() -> argparse.ArgumentParser:
    parser = Options(prog="sluice bench gpu", description=run.__doc__)
    parser.add_argument(
        "--part",
        action="append",
        default=[],
        help="number or name of a part, measured again if it was; may be repeated. Default: all that are not in the file",
    )
    parser.add_argument(
        "--into", type=Path, default=Path("outputs/gpu.json"), help="file of JSON that the parts append to"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device of PyTorch")
    parser.add_argument(
        "--shape", choices=("qwen3-0.6b", "tiny"), default="qwen3-0.6b", help="sizes; tiny takes a CPU seconds"
    )
    parser.add_argument("--limit", type=whole_number(1), default=LIMIT_S, help="seconds that a part may take")
    parser.add_argument("--list", action="store_true", help="list the parts and measure nothing")
    return parser


def _part(word: str) -> Part:
    """Return a part by its number or name."""
    for number, part in enumerate(PARTS, 1):
        if word in {str(number), part.name}:
            return part
    known = ", ".join(f"{number} {part.name}" for number, part in enumerate(PARTS, 1))
    raise ConfigError(f"there is no part {word!r}: choose from {known}")


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """Give a directory for models and versions, in shared memory if there is room."""
    shared = SHARED_MEMORY.is_dir() and psutil.disk_usage(str(SHARED_MEMORY)).free >= SHARED_ROOM
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=SHARED_MEMORY if shared else None) as name:
        yield Path(name).resolve()


def measure(part: Part, record: Record, worker: Worker, limit_s: float) -> None:
    """Measure one part into the record, whatever happens to its process."""
    if part.fresh:
        worker.close()
    record.begin(part)
    begun = time.perf_counter()
    reason, failed = "", True
    for found in worker.measure(part, limit_s):
        if "end" in found:
            reason, failed = found["reason"], False
            break
        name = found.pop("measurement")
        record.add(part, name, found)
        print(f"  {name}: {found.get('reason') or found['figures']}", flush=True)
    else:
        reason = worker.why_it_ended(limit_s)
    record.end(part, seconds=time.perf_counter() - begun, machine=worker.machine, reason=reason, failed=failed)
    if part.fresh or record.outcome(part) == FAILED:
        worker.close()  # what failed may have left the device in any state


class Worker:
    """The process that measures, started when it is needed.

    Attributes:
        machine: What it, or the last one, said of device and versions; empty before one has started.
    """

    def __init__(self, device: str, shape: str, directory: Path) -> None:
        words = [f"--device={device}", f"--shape={shape}", f"--directory={directory}"]
        self._command = [sys.executable, "-m", "benchmarks.gpu.worker", *words]
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._late = False
        self.machine: dict[str, Any] = {}

    def measure(self, part: Part, limit_s: float) -> Iterator[dict[str, Any]]:
        """Yield the answers about a part, its end last; fewer if the process ends before, or is killed at the limit."""
        limit_s += 0 if self._process else START_S
        process = self._process or self._start()
        self._late = False
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(BrokenPipeError):  # it has ended; there will be no answer
            _open(process.stdin).write(part.name + "\n")
            _open(process.stdin).flush()
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = json.loads(self._lines.get(timeout=min(LOOK_S, left)))
            except queue.Empty:
                if process.poll() is not None:
                    return
                continue
            if "machine" in answer:
                self.machine = answer["machine"]
            else:
                yield answer
        self._late = True

    def why_it_ended(self, limit_s: float) -> str:
        """Return why the process did not come to the end of the part, and end it."""
        late, process = self._late, self._process
        if process is not None and not late:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)  # it has closed its pipe, and is about to end
        self.close()
        if late:
            return f"took longer than {limit_s:g} s"
        code = None if process is None else process.returncode
        return f"its process ended with code {code}; see what it printed"

    def close(self) -> None:
        """End the process and all that it started."""
        if self._process is not None:
            _kill_tree(self._process)
            with contextlib.suppress(BrokenPipeError):
                _open(self._process.stdin).close()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            self._command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.machine, self._lines = {}, queue.SimpleQueue()
        threading.Thread(target=_read, args=(_open(self._process.stdout), self._lines), daemon=True).start()
        return self._process


def _open(pipe: Any) -> Any:  # noqa: ANN401 - a pipe that Popen made, since it was asked to
    if pipe is None:
        raise AssertionError("the process has pipes")
    return pipe


def _read(pipe: Any, lines: queue.SimpleQueue[str]) -> None:  # noqa: ANN401
    """Pass lines on until the pipe ends: a process that was forked may keep it open longer than its parent lives."""
    for line in pipe:
        lines.put(line)


def _kill_tree(process: subprocess.Popen[str], wait_s: float = 30.0) -> None:
    """Kill a process and its children, and wait for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children: Sequence[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
