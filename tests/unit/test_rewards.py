"""Rewards of the environment `question_answer`: compared, tested in the sandbox, judged by a model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.rewards import gsm8k_reward
from sluice.errors import ConfigError

LIMIT_S = 300.0
"""Limit of what ends by itself at once."""


def asks(path: Path, answer: str, **arguments: Any) -> EnvironmentProcesses:
    (path / "rows.jsonl").write_text(json.dumps({"question": "What?", "answer": answer}) + "\n")
    given = {"dataset": str(path / "rows.jsonl"), **arguments}
    config = EnvironmentProcessesConfig(count=1, variables=["JUDGE_KEY"], score_retries=0, score_s=LIMIT_S)
    return EnvironmentProcesses("question_answer", given, config, (60.0, "start_s"))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("so 1,234", 1.0), ("#### 1234", 1.0), ("1234.0", 1.0), ("1234 or 5", 0.0), ("none", 0.0), ("-1234", 0.0)],
)
def test_of_gsm8k_the_last_number_counts(completion: str, reward: float) -> None:
    assert gsm8k_reward(completion, "One step.\n#### 1,234") == reward


async def test_programs_are_tested_in_the_sandbox(tmp_path: Path) -> None:
    answer = "assert double(2) == 4\nassert double(-1) == -2"
    async with asks(tmp_path, answer, reward="code", limits={"wall_s": LIMIT_S, "cpu_s": 2}) as questions:
        (task,) = await questions.tasks("train", 0)
        answers = ["def double(x): return 2 * x", "def double(x): return 4", "open('/etc/passwd')", "while True: pass"]
        assert await questions.score(task, answers) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": "code", "limits": {"hours": 1}}, "no such limit"),
        ({"reward": "code", "sandbox": "maybe"}, 'sandbox is "auto" or "none"'),
        ({"reward": "exact", "judge": {"url": "http://a/v1", "model": "m"}}, "either reward or judge"),
        ({"judge": {"url": "a/v1", "model": "m"}}, "begins with http"),
        ({"judge": {"url": "http://a/v1"}}, "model"),
    ],
)
async def test_settings_that_cannot_be_used_are_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        async with asks(tmp_path, "x", **arguments):
            pass


class Answers(BaseHTTPRequestHandler):
    """A judge: gives the length of the answer in tenths; is silent, busy or beside the point where the answer says so."""

    asked: list[str]
    keys: set[str | None]
    ended: threading.Event
    under_way = 0
    most_under_way = 0

    def do_POST(self) -> None:
        kind = type(self)
        kind.under_way += 1
        kind.most_under_way = max(kind.most_under_way, kind.under_way)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][0]["content"].split("judge: ")[1].split("\n")[0]
        kind.asked.append(text)
        kind.keys.add(self.headers["authorization"])
        if text == "silent":
            kind.ended.wait()
        busy = text == "busy" and kind.asked.count("busy") < 3
        said = "I do not know." if text == "beside" else f"It is good.\nScore: {len(text) / 10}"
        answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
        kind.under_way -= 1
        self.send_response(503 if busy else 401 if text == "forbidden" else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Print nothing."""


@pytest.fixture
def judge() -> Iterator[tuple[str, type[Answers]]]:
    handler = type("Handler", (Answers,), {"asked": [], "keys": set(), "ended": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", handler
    handler.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_judge_scores_once_what_is_asked_twice_and_its_key_stays_its_own(
    tmp_path: Path, judge, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    url, handler = judge
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    settings = {"url": url, "model": "m", "key_variable": "JUDGE_KEY", "timeout_s": LIMIT_S, "temperature": 0}
    settings["at_a_time"] = 2
    async with asks(tmp_path, "yes", judge=settings) as questions:
        (task,) = await questions.tasks("train", 0)
        words = ["a", "bb", "ccc", "dddd", "eeeee"]
        assert await questions.score(task, words) == [0.1, 0.2, 0.3, 0.4, 0.5]
        assert await questions.score(task, words[::-1]) == [0.5, 0.4, 0.3, 0.2, 0.1]
        assert sorted(handler.asked) == words, "each once"
        assert handler.most_under_way <= 2
        assert handler.keys == {"Bearer sk-very-secret"}
        assert await questions.score(task, ["busy"]) == [0.4], "asked again until it answers"
        assert await questions.score(task, ["beside", "forbidden", "ff"]) == [None, None, 0.2]
        assert questions.failures["missing"] == 2
    printed = "".join(capfd.readouterr())
    assert "sk-very-secret" not in printed
    assert "refused a request with status 401" in printed


async def test_the_reward_of_a_judge_that_is_silent_is_missing(tmp_path: Path, judge, capfd) -> None:
    url, handler = judge
    async with asks(tmp_path, "yes", judge={"url": url, "model": "m", "timeout_s": 3}) as questions:
        (task,) = await questions.tasks("train", 0)
        assert await questions.score(task, ["silent", "silent"]) == [None, None]
        assert questions.failures["missing"] == 2
    assert set(handler.asked) <= {"silent"}
    assert "gave no answer within 3 s" in "".join(capfd.readouterr())
