"""`sluice eval` of several environments and checkpoints, of a model behind an endpoint, and continued after it was interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sluice.cli.init_model import ModelShape, init_model
from sluice.cli.main import main

SLUICE = (sys.executable, "-m", "sluice.cli.main")
TASKS = 12
SHAPE = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48)

ENVIRONMENTS = """
from sluice.environments import Score, Task, Turn

class Adds:
    name = "adds"
    def tasks(self, split, seed):
        return [Task(str(n), {"n": n}) for n in range(12)]
    def messages(self, task):
        return [{"role": "user", "content": f"{task.data['n']} + 1?"}]
    def score(self, task, completion):
        right = float(completion == str(task.data["n"] + 1))
        return Score(right, {"length": len(completion)})

class Asks:
    name = "asks"
    def tasks(self, split, seed):
        return [Task(str(n)) for n in range(4)]
    def reset(self, task, seed):
        return Asking()

class Asking:
    messages = [{"role": "user", "content": "Use it."}]
    tools = [{"type": "function", "function": {"name": "use", "parameters": {"type": "object"}}}]
    def step(self, said):
        if said.get("tool_calls"):
            return Turn(messages=[{"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "used"}])
        return Turn(reward=1.0, done=True)
"""


class Endpoint(BaseHTTPRequestHandler):
    """Adds one; is wrong about odd numbers every other time; uses a tool that it is offered. Answers `most` requests until `open` is set."""

    asked: list[str]
    lock = threading.Lock()
    open: threading.Event
    most = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        last = body["messages"][-1]
        with self.lock:
            self.asked.append(last["content"])
            count, late = self.asked.count(last["content"]), len(self.asked) > self.most
        if late:
            self.open.wait()
        said: dict[str, object]
        if last["content"] == "Use it.":
            call = {
                "id": "c",
                "type": "function",
                "function": {"name": body["tools"][0]["function"]["name"], "arguments": "{}"},
            }
            said = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif last["role"] == "tool":
            said = {"role": "assistant", "content": "done"}
        else:
            number = int(last["content"].split()[0])
            wrong = number % 2 and count % 2
            said = {"role": "assistant", "content": str(number + (2 if wrong else 1))}
        usage = {"prompt_tokens": 5, "completion_tokens": 3}
        answer = json.dumps({"choices": [{"message": said, "finish_reason": "stop"}], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Print nothing."""


@pytest.fixture
def endpoint() -> Iterator[tuple[str, type[Endpoint]]]:
    handler = type("Handler", (Endpoint,), {"asked": [], "open": threading.Event()})
    handler.open.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", handler
    handler.open.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def env(tmp_path: Path) -> str:
    (tmp_path / "env.py").write_text(ENVIRONMENTS)
    return f"{tmp_path}/env.py"


def run(capfd: pytest.CaptureFixture[str], words: list[str]) -> tuple[int, str, str]:
    """Run a `sluice` command in this process; return its exit code and what it wrote to its output and to its errors."""
    code = main(words)
    return code, *capfd.readouterr()


def by_endpoint(url: str, env: str, tmp_path: Path, *more: str) -> list[str]:
    settings = {"url": url, "model": "m", "environment": f"{env}:Adds", "samples": "4", "greedy": "false"}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    return ["eval", *words, "--output", str(tmp_path / "result.json"), *more]


@pytest.mark.slow
def test_a_model_behind_an_endpoint_is_evaluated(
    endpoint, env: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url, _ = endpoint
    both = json.dumps(
        [{"name": "adds", "environment": f"{env}:Adds"}, {"name": "asks", "environment": f"{env}:Asks", "samples": 1}]
    )
    argv = [each for each in by_endpoint(url, env, tmp_path) if each not in {"--environment", f"{env}:Adds"}]
    code, said, errors = run(capfd, [*argv, "--environments", both])
    assert code == 0, said + errors
    adds, asks = json.loads((tmp_path / "result.json").read_text())["results"]
    assert (adds["environment"], adds["episodes"], adds["tokens"]) == ("adds", 4 * TASKS, 3 * 4 * TASKS)
    assert adds["metrics"]["reward_mean"] == 0.75
    assert adds["metrics"]["pass_at_4"] == 1.0
    assert adds["metrics"]["pass_at_2"] == pytest.approx(0.5 * 1 + 0.5 * (1 - 1 / 6)), (
        "1 - C(2, 2) / C(4, 2) for odd numbers"
    )
    assert adds["metrics"]["environment/length"] > 1
    assert (asks["episodes"], asks["metrics"]["reward_mean"]) == (4, 1.0)
    assert "pass@4             1.0000" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_good_attempts_become_demonstrations_that_a_model_learns_from(
    endpoint, env: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url, _ = endpoint
    both = [
        {"name": "adds", "environment": f"{env}:Adds", "samples": 3},
        {"name": "asks", "environment": f"{env}:Asks", "samples": 2},
    ]
    data = tmp_path / "data/good.jsonl"
    settings = {"url": url, "model": "m", "environments": json.dumps(both), "data": str(data), "keep": "2"}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    code, said, errors = run(capfd, ["synthesize", *words])
    assert code == 0, said + errors
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    sums = [row for row in rows if row["messages"][0]["content"] != "Use it."]
    assert len(rows) == TASKS + 4, "equal attempts are kept once"
    assert all(int(row["messages"][1]["content"]) == int(row["messages"][0]["content"].split()[0]) + 1 for row in sums)
    used = next(row for row in rows if row not in sums)
    assert [each["role"] for each in used["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert used["tools"][0]["function"]["name"] == "use"
    assert f"{len(rows)} of {3 * TASKS + 8} attempts" in said
    init_model(tmp_path / "base", SHAPE)
    learn = {"model": tmp_path / "base", "data": data, "output": tmp_path / "tuned", "max-steps": 2, "batch-size": 4}
    code, said, errors = run(
        capfd, ["sft", *(word for name, value in learn.items() for word in (f"--{name}", str(value)))]
    )
    assert code == 0, said + errors
    code, _, _ = run(capfd, ["synthesize", *words, "--threshold", "2"])
    assert (code, data.read_text()) == (1, "")


@pytest.mark.slow
def test_an_evaluation_that_was_killed_continues_and_asks_nothing_twice(
    endpoint, env: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url, handler = endpoint
    handler.most = 4 * TASKS // 2
    handler.open.clear()
    file = tmp_path / "attempts.jsonl"
    argv = by_endpoint(url, env, tmp_path, "--attempts", str(file), "--concurrency", "2")
    with subprocess.Popen([*SLUICE, *argv], start_new_session=True, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") >= 4):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    handler.open.set()
    before = file.read_text().splitlines()
    assert 4 <= len(before) < 1 + TASKS, "killed in the middle"
    kept = {json.loads(line)["task"] for line in before[1:]}
    with file.open("a") as torn:
        torn.write('{"task": "11", "sam')
    handler.asked.clear()
    code, said, errors = run(capfd, argv)
    assert code == 0, said + errors
    assert f"{len(kept)} tasks were attempted before" in errors
    assert {each.split()[0] for each in handler.asked} == {str(n) for n in range(TASKS)} - kept
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["episodes"], result["prompts"]) == (4 * TASKS, TASKS)
    assert len(file.read_text().splitlines()) == 1 + TASKS
    handler.asked.clear()
    code, _, errors = run(capfd, [*argv, "--samples", "2"])
    assert code == 2
    assert "belongs to another evaluation: samples was 4, is 2" in errors
    assert not handler.asked


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_evaluates_each_checkpoint_and_draws_them(
    env: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 10):
        init_model(tmp_path / f"weights/v1.{step}", SHAPE, seed=step)
    settings = {
        "weights-dir": str(tmp_path / "weights"),
        "environment": f"{env}:Adds",
        "engine": "transformers",
        "samples": "2",
        "max-tokens": "4",
        "prompts": "3",
        "output": str(tmp_path / "sweep.json"),
        "plot": str(tmp_path / "sweep.png"),
        "attempts": str(tmp_path / "attempts.jsonl"),
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    code, said, errors = run(capfd, ["eval", *words])
    assert code == 0, said + errors
    results = json.loads((tmp_path / "sweep.json").read_text())["results"]
    assert [each["checkpoint"] for each in results] == ["v1.2", "v1.10"], "by number, not by name"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(each.name for each in tmp_path.glob("attempts*")) == ["attempts.v1.10.jsonl", "attempts.v1.2.jsonl"]
    code, _, errors = run(capfd, ["eval", *words, "--steps", "2,7"])
    assert code == 2
    assert "has no step 7; it has 2, 10" in errors
