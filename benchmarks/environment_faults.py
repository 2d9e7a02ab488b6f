"""A run whose environments hang, crash, leak, answer twice or answer garbage, and whose judge times out: what is counted.

One task in eight of each environment goes wrong; two environments have no such task, so that the table shows what the others cost
them. The run is a real one, `sluice rl` with a model from scratch; it must make every step, with an exact audit, and throw away nothing
of the sound environments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Table

from benchmarks.children import log_tail, make_model, scratch
from benchmarks.faulty_environments import FAULTY, TASKS, Sound
from orchestrator_svc.commands.audit import audit_run

HERE = Path(__file__).with_name("faulty_environments.py")

RUN = "faults"

CLASSES = ("Sound", "HangsBefore", "HangsAtScore", "Crashes", "Leaks", "AnswersTwice", "AnswersGarbage")

JUDGE_S = 2.0
"""Seconds that the judge has."""

CALL_S = 1.0
SCORE_S = 4.0
MEMORY_MIB = 256
RUN_S = 900.0

PLAIN = "questions"
"""The environment whose judge answers in time. The judge of `LATE` does not."""
LATE = "late_judge"

SOUND = {"Sound", "AnswersTwice", PLAIN}
"""Environments without failures: the second answer of a process that forked goes nowhere."""

COLUMNS = ("groups", "groups_accepted", "groups_failed", "quarantined_count")
COUNTS = ("failed_calls", "processes_ended")


def run(argv: list[str]) -> Mapping[str, Any]:
    """Run, and print the outcome of each environment's groups; `failures` of the JSON line must be empty."""
    parser = argparse.ArgumentParser(prog="sluice bench environment-faults", description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="steps of the run")
    parser.add_argument("--keep", type=Path, help="directory to keep everything in")
    options = parser.parse_args(argv)
    with scratch(options.keep) as directory, judge() as url:
        settings = write_settings(directory, url, options.steps)
        seconds, failures = _run(settings, directory)
        return _result(directory / RUN, options.steps, seconds, failures)


def write_settings(directory: Path, judge_url: str, steps: int) -> Path:
    """Write the run's settings, and the data of its questions; return the file of the settings."""
    model = make_model(directory / "model")
    data = directory / "questions.jsonl"
    rows = [
        {"question": task.data["text"], "answer": task.data["text"][0], "late": task.data["faulty"]}
        for task in Sound().tasks("train", 0)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows if not row["late"]))
    late = directory / "late.jsonl"
    late.write_text(
        "".join(json.dumps({**row, "question": "late " * row["late"] + row["question"]}) + "\n" for row in rows)
    )
    environments: list[dict[str, Any]] = [{"name": name, "environment": f"{HERE}:{name}"} for name in CLASSES]
    for name, dataset in ((PLAIN, data), (LATE, late)):
        asked = {"url": judge_url, "model": "judge", "prompt": "{question}\n{completion}", "timeout_s": JUDGE_S}
        environments.append(
            {"name": name, "environment": "question_answer", "args": {"dataset": str(dataset), "judge": asked}}
        )
    settings = {
        "run": RUN,
        "model": str(model),
        "output_dir": str(directory),
        "max_staleness": 2,
        "orchestrator": {
            "environments": environments,
            "batch_size": len(environments),
            "group_size": 4,
            "max_steps": steps,
            "advantage": "grpo",
            "sampling": {"max_tokens": 12},
            "environment_processes": {"count": 2, "call_s": CALL_S, "score_s": SCORE_S, "memory_mib": MEMORY_MIB},
        },
        "trainer": {"lr": 1e-4},
        "rollout": {"engine": "transformers", "max_model_len": 128},
    }
    file = directory / "rl.toml"
    file.write_text(tomli_w.dumps(settings))
    return file


@contextlib.contextmanager
def judge() -> Iterator[str]:
    """Serve a judge that says 1 or 0 at once. For questions that begin with ``late`` it says nothing until its client has left."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"][-1]["content"]
            if asked.startswith("late"):
                time.sleep(JUDGE_S * 3)
                self.close_connection = True
                return
            question, _, completion = asked.partition("\n")
            score = float(question[0] in completion)
            content = json.dumps(
                {"choices": [{"message": {"role": "assistant", "content": f"score: {score}"}}]}
            ).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class has this name
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _run(settings: Path, directory: Path) -> tuple[float, list[str]]:
    began, log = time.monotonic(), directory / "run.log"
    command = [sys.executable, "-m", "sluice.cli.main", "rl", "@", str(settings), "--plain"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # noqa: S603 - our own
        try:
            code = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
            return time.monotonic() - began, [f"the run did not end within {RUN_S:g} s: {log_tail(log)}"]
    failures = [f"`sluice rl` ended with code {code}: {log_tail(log)}"] if code else []
    return time.monotonic() - began, failures


def _result(run_dir: Path, steps: int, seconds: float, failures: list[str]) -> Mapping[str, Any]:
    try:
        report = json.loads((run_dir / "report.json").read_text())
    except OSError:
        return {"ratios": {}, "failures": failures or ["the run left no report"]}
    rows = {each["name"]: each for each in report["environments"]}
    table = Table("environment", *(name.replace("_", " ") for name in COLUMNS), "failed calls", "processes ended")
    for name, row in rows.items():
        table.add_row(name, *(str(row[column]) for column in COLUMNS), *(_counts(row[column]) for column in COUNTS))
        wrong = row["groups_failed"] or any(row[column] for column in COUNTS)
        if wrong and name in SOUND:
            failures.append(f"{name} has failures, though nothing goes wrong there")
        elif not wrong and name not in SOUND:
            failures.append(f"nothing was seen to go wrong in {name}: it needs more steps")
    Console(width=140).print(table)
    dropped = ", ".join(f"{count} {reason}" for reason, count in report["trajectories_dropped"].items())
    result = audit_run(run_dir)
    failures += [f"audit: {each.problem}" for each in result.differences[:5]]
    if report["steps"] != steps:
        failures.append(f"{report['steps']} steps instead of {steps}")
    print(
        f"{TASKS} tasks each, one in {FAULTY} goes wrong; {report['steps']} steps in {seconds:.0f} s;"
        f" trajectories dropped: {dropped or 'none'}; audit: {result.accepted} accepted, {result.trained} trained,"
        f" {len(result.differences)} differences"
    )
    return {
        "ratios": {"trained_over_accepted": round(result.trained / max(1, result.accepted), 4)},
        "seconds": round(seconds, 1),
        "environments": {name: {column: row[column] for column in (*COLUMNS, *COUNTS)} for name, row in rows.items()},
        "groups_failed": report["groups_failed"],
        "audit_differences": len(result.differences),
        "failures": failures,
    }


def _counts(counts: Mapping[str, int]) -> str:
    return (
        ", ".join(f"{count} {reason.removeprefix('ENVIRONMENT_').lower()}" for reason, count in counts.items())
        or "none"
    )
