"""`sluice env`: what there is, what one needs, and an episode played by a person or by an endpoint."""

from __future__ import annotations

import io
import json
import subprocess
import threading
import venv
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sluice.cli import env
from sluice.config import ConfigError

SHOP = """
import json
from sluice.environments import Task, Turn

class Shop:
    '''Sells one thing.

    Args:
        price: What it costs.
    '''

    name = "shop"

    def __init__(self, price: int, *, word: str = "pen"):
        self.price, self.word = price, word

    def tasks(self, split, seed):
        return [Task("one"), Task("two")]

    def reset(self, task, seed):
        return Visit(self)


class Visit:
    tools = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]

    def __init__(self, shop):
        self.shop = shop
        self.messages = [{"role": "user", "content": f"How much is the {shop.word}?"}]

    def step(self, said):
        if calls := said.get("tool_calls"):
            return Turn(messages=[{"role": "tool", "tool_call_id": calls[0]["id"], "content": str(self.shop.price)}])
        return Turn(reward=float(said["content"] == str(self.shop.price)), done=True, metrics={"length": 1})


class Question:
    name = "question"
    def tasks(self, split, seed):
        return [Task("q")]
    def messages(self, task):
        return [{"role": "user", "content": "2 + 2?"}]
    def score(self, task, completion):
        return float(completion == "4")
"""


@pytest.fixture
def shop(tmp_path: Path) -> str:
    (tmp_path / "shop.py").write_text(SHOP)
    return f"{tmp_path}/shop.py"


class Model(BaseHTTPRequestHandler):
    """Calls the tool, then answers with its result. The very first request is refused as temporarily unavailable."""

    asked: list[dict[str, Any]]
    keys: list[str | None]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        self.keys.append(self.headers["authorization"])
        last = body["messages"][-1]
        call = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": "{}"}}
        said = (
            {"role": "assistant", "content": last["content"]}
            if last["role"] == "tool"
            else {"role": "assistant", "content": None, "tool_calls": [call]}
        )
        busy = len(self.asked) == 1
        answer = json.dumps({"choices": [{"message": said, "finish_reason": "stop"}]}).encode()
        self.send_response(429 if busy else 200)
        self.send_header("retry-after", "0.01")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Print nothing."""


@pytest.fixture
def endpoint() -> Iterator[tuple[str, type[Model]]]:
    handler = type("Handler", (Model,), {"asked": [], "keys": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_list_has_every_name_with_a_line_about_it(capsys) -> None:
    assert env.run(["list"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line.strip())
    for name in ("question_answer", "reasoning_gym", "textarena", "verifiers"):
        assert len(rows[name]) > 10


def test_what_an_environment_needs_is_shown_without_importing_it(shop: str, capsys) -> None:
    Path(shop).write_text(f"import no_such_package\n{SHOP}")
    assert env.run(["show", f"{shop}:Shop"]) == 0
    shown = capsys.readouterr().out
    assert "Sells one thing." in shown
    assert "price: int" in shown
    assert f"sluice env try {shop}:Shop price=..." in shown


def test_a_person_plays_an_episode_with_a_tool(shop: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("price {}\n\n7\n\n"))
    assert env.run(["try", f"{shop}:Shop", "price=7", "word=cup"]) == 0
    shown = capsys.readouterr().out
    assert "How much is the cup?" in shown
    assert "tool:\n    7" in shown
    assert shown.rstrip().endswith("length 1\nreward 1")


def test_an_episode_that_ends_by_the_number_of_answers_gets_what_it_is_worth(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n\n"))
    patient = Path(__file__).parents[1] / "contract/dialogue_environment.py"
    assert env.run(["try", f"{patient}:Patient", "--max-turns", "2"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("ended after 2 answers (--max-turns)\nreward 1.5")


def test_a_person_answers_a_question(shop: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("4\n\n"))
    assert env.run(["try", f"{shop}:Question"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("reward 1")


@pytest.mark.slow
def test_an_endpoint_plays_and_its_refusal_for_a_moment_is_waited_out(
    shop: str, endpoint, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    url, model = endpoint
    monkeypatch.setenv("MY_KEY", "secret-of-mine")
    arguments = ["--url", url, "--model", "m", "--key-variable", "MY_KEY", "--count", "2"]
    arguments += ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert env.run(["try", f"{shop}:Shop", "price=7", *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.count("→ price({})") == shown.count("reward 1") == 2
    assert "secret-of-mine" not in shown
    assert set(model.keys) == {"Bearer secret-of-mine"}
    assert len(model.asked) == 5, "two turns of two episodes, and the one that was refused"
    assert model.asked[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert model.asked[-1]["tools"][0]["function"]["name"] == "price"
    assert [each["role"] for each in model.asked[-1]["messages"]] == ["user", "assistant", "tool"]


def test_an_endpoint_that_refuses_is_named_and_the_episode_counts_as_failed(shop: str, capsys) -> None:
    assert env.run(["try", f"{shop}:Question", "--url", "http://127.0.0.1:1/v1", "--timeout", "0.3"]) == 1
    assert "http://127.0.0.1:1/v1/chat/completions gave no answer within 0.3 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "no_such"], "no environment 'no_such' is installed"),
        (["try", "{shop}:Shop", "7"], "as key=value"),
        (["try", "{shop}:Shop"], "refuses its environment_args"),
        (["try", "{shop}:Question", "--first", "1"], "has no task 1"),
        (["try", "{shop}:Question", "--url", "localhost"], "begins with http"),
        (["try", "{shop}:Question", "--python", "no/such/python"], "there is no such program"),
        (["play"], "no command `sluice env play`"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_the_reason(shop: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        env.run([word.format(shop=shop) for word in words])


def test_another_interpreter_runs_an_environment_whose_package_is_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    venv.create(tmp_path / "other", with_pip=False)
    python = str(tmp_path / "other/bin/python")
    packages = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    (Path(packages) / "only_there.py").write_text(
        SHOP + "\nimport importlib.util\nassert not importlib.util.find_spec('grpc')\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("4\n\n"))
    with pytest.raises(ConfigError, match="only_there"):
        env.run(["try", "only_there:Question"])
    assert env.run(["try", "only_there:Question", "--python", python]) == 0
    assert capsys.readouterr().out.rstrip().endswith("reward 1")
