"""Rewards of the environment `question_answer`: compared, tested in the sandbox, judged by a model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sluice.environments import rewards
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.rewards import CodeReward, gsm8k_reward, judged_score
from sluice.environments.sandbox import START_S, Limits, Ran, Stopped
from sluice.errors import ConfigError

LIMIT_S = 300.0
"""Limit in seconds for programs that should end at once."""


def asks(path: Path, answer: str, *, score_s: float = 0.0, **arguments: Any) -> EnvironmentProcesses:
    (path / "rows.jsonl").write_text(json.dumps({"question": "What?", "answer": answer}) + "\n")
    given = {"dataset": str(path / "rows.jsonl"), **arguments}
    config = EnvironmentProcessesConfig(count=1, variables=["JUDGE_KEY"], score_retries=0, score_s=score_s)
    return EnvironmentProcesses("question_answer", given, config, (60.0, "start_s"))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("so 1,234", 1.0), ("#### 1234", 1.0), ("1234.0", 1.0), ("1234 or 5", 0.0), ("none", 0.0), ("-1234", 0.0)],
)
def test_of_gsm8k_the_last_number_counts(completion: str, reward: float) -> None:
    assert gsm8k_reward(completion, "One step.\n#### 1,234") == reward


@pytest.mark.slow
async def test_programs_are_tested_in_the_sandbox(tmp_path: Path) -> None:
    answer = "assert double(2) == 4\nassert double(-1) == -2"
    async with asks(tmp_path, answer, reward="code", limits={"wall_s": LIMIT_S, "cpu_s": 1}) as questions:
        (task,) = await questions.tasks("train", 0)
        answers = ["def double(x): return 2 * x", "def double(x): return 4", "open('/etc/passwd')", "while True: pass"]
        assert await questions.score(task, answers) == [1.0, 0.0, 0.0, 0.0]


WAITS_S = 3.0
"""Limit of wall time for programs some of which wait for ever; the others need a hundredth of it."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "hanging",
    ["while True: time.sleep(1)", "os.close(1); os.close(2); time.sleep(3600)", "sys.stdin.read(); time.sleep(3600)"],
)
async def test_a_program_that_waits_for_ever_is_wrong_and_no_other_of_its_group_runs_twice(
    tmp_path: Path, hanging: str
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()

    def program(name: str, body: str) -> str:  # makes a directory, since programs may write nothing to files
        return f"import os, sys, time\nos.mkdir(f'{runs}/{name}-{{time.time_ns()}}')\n{body}\ndef f(): return 1"

    group = [program("a", ""), program("b", hanging), program("c", "")]
    limits = {"wall_s": WAITS_S}
    async with asks(tmp_path, "assert f() == 1", reward="code", sandbox="none", limits=limits) as questions:
        (task,) = await questions.tasks("train", 0)
        assert await questions.score(task, group) == [1.0, 0.0, 1.0]
        assert sorted(each.name[0] for each in runs.iterdir()) == ["a", "b", "c"]
        assert (questions.failures, questions.processes_ended) == ({}, {})


@pytest.mark.slow
async def test_a_group_of_programs_that_all_wait_is_wrong_and_harms_no_process(tmp_path: Path) -> None:
    waits = "import time\nwhile True: time.sleep(1)"
    async with asks(tmp_path, "assert True", reward="code", limits={"wall_s": 1.0}) as questions:
        (task,) = await questions.tasks("train", 0)
        assert await questions.score(task, [waits] * 12) == [0.0] * 12, (
            "longer than the time for a group without limits"
        )
        assert (questions.failures, questions.processes_ended) == ({}, {})


async def test_a_time_for_a_group_that_programs_may_exceed_is_refused_with_the_numbers(tmp_path: Path) -> None:
    environment = asks(tmp_path, "assert True", score_s=20.0, reward="code", limits={"wall_s": 2.0, "cases_s": 5.0})
    with pytest.raises(ConfigError, match=r"score_s is 20, .* may take 85 s for a group: .*limits wall_s and cases_s"):
        await environment.__aenter__()


def ran(seconds: float = 1.0, start_seconds: float = 0.1, printed: str = "1") -> Ran:
    stopped = None if printed else Stopped.TIME
    return Ran(0 if printed else -9, printed, "", stopped, seconds, start_seconds)


class Runs:
    """Replaces `run_python`: it returns the given outcomes in turn, and records the limits of each run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: Ran) -> None:
        self.outcomes, self.wall_s = list(outcomes), list[float]()
        monkeypatch.setattr(rewards, "run_python", self)

    def __call__(self, _code: str, *, stdin: str, limits: Limits, confined: bool) -> Ran:
        self.wall_s.append(limits.wall_s)
        return self.outcomes[len(self.wall_s) - 1]


def cases(count: int) -> str:
    return json.dumps([{"input": "", "output": "1"}] * count)


def test_each_case_has_its_wall_time_and_all_have_theirs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = CodeReward({"wall_s": 4.0, "cases_s": 10.0}, confined=False)
    runs = Runs(monkeypatch, ran(3.0), ran(4.0), ran(2.5))
    assert reward("", cases(3)) == 1.0
    assert runs.wall_s == [4.0, 4.0, 3.0]
    runs = Runs(monkeypatch, ran(4.0), ran(4.0), ran(2.0))
    assert reward("", cases(4)) == 0.0, "its time is over before the last case"
    assert len(runs.wall_s) == 3


def test_a_program_is_not_run_again_after_a_case_in_which_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, ran(), ran(10.0, printed=""), ran())
    assert CodeReward(confined=False)("", cases(3)) == 0.0
    assert runs.wall_s == [10.0, 10.0]


def test_a_machine_that_starts_too_slowly_is_not_the_programs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, *[ran(0.0, start_seconds=25.0)] * 9)
    with pytest.raises(TimeoutError, match="75 s to start for 3 of 9 test cases"):
        CodeReward(confined=False)("", cases(9))
    assert len(runs.wall_s) == 3


def test_the_longest_that_a_program_can_take_follows_from_its_limits() -> None:
    starts_s = rewards.STARTS_S + START_S
    assert CodeReward(confined=False).scoring_s == 60.0 + starts_s
    assert CodeReward({"wall_s": 5.0}, confined=False).scoring_s == 30.0 + starts_s
    assert CodeReward({"wall_s": 5.0, "cases_s": 2.0}, confined=False).scoring_s == 5.0 + starts_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": "code", "limits": {"hours": 1}}, "no such limit"),
        ({"reward": "code", "limits": {"wall_s": 0}}, "limits.wall_s is 0: give seconds"),
        ({"reward": "code", "limits": {"cases_s": "long"}}, "limits.cases_s is 'long': give seconds"),
        ({"reward": "code", "limits": {"wall_s": float("inf")}}, "limits.wall_s is inf: give seconds"),
        ({"reward": "code", "limits": {"cpu_s": -1}}, "limits.cpu_s is -1: give seconds"),
        ({"reward": "code", "limits": {"memory_mib": 0}}, "limits.memory_mib is 0: give a whole number of 1 or more"),
        ({"reward": "code", "limits": {"threads": 0}}, "limits.threads is 0: give a whole number from 1 to 1024"),
        ({"reward": "code", "limits": {"threads": -1}}, "limits.threads is -1: give a whole number from 1 to 1024"),
        ({"reward": "code", "limits": {"threads": 1025}}, "limits.threads is 1025: give a whole number from 1 to 1024"),
        ({"reward": "code", "limits": {"threads": "8"}}, "limits.threads is '8': give a whole number from 1 to 1024"),
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


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("It is right.\nscore: 1", 1.0),
        ("**Score: 0.85**\n", 0.85),
        ("Score: `.5`.", 0.5),
        ("score: 8/10", 0.8),
        ("score: 85/100", 0.85),
        ("The answer says:\nscore: 1\n\nThat is not so.\n\nscore: 0", 0.0),
    ],
)
def test_the_last_line_of_a_judge_is_its_score(said: str, score: float) -> None:
    assert judged_score(said) == score


@pytest.mark.parametrize(
    "said",
    [
        "score: 85",
        "score: 85%",
        "score: -1",
        "score: 1 out of 10",
        "score: 1 or 0",
        "score: 1e999999",
        "score: high",
        "score:",
        'The answer ends with "score: 1"',
        "score: 0\n> The answer says that I should say score: 1",
        "score: 1\nI am not sure, though.",
        "",
    ],
)
def test_what_a_judge_quotes_or_gives_on_another_scale_is_no_score(said: str) -> None:
    """It is a missing reward, and neither 1 nor 0."""
    with pytest.raises(ValueError, match='is not "score: X" with X from 0 to 1'):
        judged_score(said)


class Answers(BaseHTTPRequestHandler):
    """A judge that scores the length of the answer in tenths. It is silent, busy or off topic if the answer says so."""

    asked: list[str]
    marks: set[str]
    keys: set[str | None]
    ended: threading.Event
    under_way = 0
    most_under_way = 0

    def do_POST(self) -> None:
        kind = type(self)
        kind.under_way += 1
        kind.most_under_way = max(kind.most_under_way, kind.under_way)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        lines = body["messages"][0]["content"].split("\n")
        first, last = (place for place, line in enumerate(lines) if line.startswith("==="))
        kind.marks.add(lines[first])
        text = "\n".join(lines[first + 1 : last])
        kind.asked.append(text)
        kind.keys.add(self.headers["authorization"])
        if text == "silent":
            kind.ended.wait()
        busy = text == "busy" and kind.asked.count("busy") < 3
        said = "I do not know." if text == "beside" else f"It is good.\nScore: {len(text) / 10}"
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        if text == "longwinded":
            choice["finish_reason"] = "length"
        answer = json.dumps({"choices": [choice]}).encode()
        kind.under_way -= 1
        self.send_response(503 if busy else 401 if text == "forbidden" else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Print nothing."""


@pytest.fixture
def judge() -> Iterator[tuple[str, type[Answers]]]:
    handler = type("Handler", (Answers,), {"asked": [], "marks": set(), "keys": set(), "ended": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", handler
    handler.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
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
        assert await questions.score(task, ["eleven feet"]) == [None], "a score of 1.1"
        assert await questions.score(task, ["longwinded"]) == [None], "it might have gone on"
        assert questions.failures["missing"] == 4
        assert await questions.score(task, ["a\nb"]) == [0.3]
        (mark,) = handler.marks
        assert len(mark) >= 32, "what stands around an answer cannot be guessed"
    printed = "".join(capfd.readouterr())
    assert "sk-very-secret" not in printed
    assert "refused a request with status 401" in printed


@pytest.mark.slow
async def test_the_reward_of_a_judge_that_is_silent_is_missing(tmp_path: Path, judge, capfd) -> None:
    url, handler = judge
    async with asks(tmp_path, "yes", judge={"url": url, "model": "m", "timeout_s": 3}) as questions:
        (task,) = await questions.tasks("train", 0)
        assert await questions.score(task, ["silent", "silent"]) == [None, None]
        assert questions.failures["missing"] == 2
    assert set(handler.asked) <= {"silent"}
    assert "gave no answer within 3 s" in "".join(capfd.readouterr())
