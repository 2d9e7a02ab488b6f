"""The example wiki_search: what its tools say, what an answer is worth, and that no held-out article is ever trained on."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orchestrator_svc.commands.eval.command import check_evaluation
from orchestrator_svc.commands.eval.config import EvalConfig
from sluice.cli.rl import run
from sluice.config import load_command
from sluice.environments import Task, Turn
from sluice.environments.loading import load_environment

ROOT = Path(__file__).parents[2]

EXAMPLE = ROOT / "examples/wiki_search"

ARTICLES = [
    {"title": "Aldorf", "text": "Aldorf lies on the Mur. Its mayor is Ada. Bells are made there, and bells alone."},
    {"title": "Borton", "text": "Borton lies on the Mur and makes drums."},
    {"title": "Calwen", "text": "Calwen, on the Esk, is known for bells."},
]

QUESTION = {"question": "Who is mayor of the town on the Mur with the bells?", "answer": "Ada Brill", "title": "Aldorf"}

NO_TENSORS = b"\x02" + bytes(7) + b"{}"
"""A safetensors file of a model that is not loaded."""


def lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def wiki(tmp_path: Path) -> Any:
    """The environment on three articles."""
    lines(tmp_path / "articles.jsonl", ARTICLES)
    lines(tmp_path / "questions.jsonl", [QUESTION])
    return load_environment(f"{EXAMPLE / 'env.py'}:WikiSearch", {"directory": str(tmp_path)})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Articles, questions and demonstrations as prepare.sh has them written."""
    path = tmp_path_factory.mktemp("wiki")
    for script in ("articles.py", "demonstrations.py"):
        more = ["--count", "300"] if script == "demonstrations.py" else []
        subprocess.run([sys.executable, EXAMPLE / script, path, *more], check=True, capture_output=True, timeout=60)
    return path


def calls(*called: tuple[str, str]) -> dict[str, Any]:
    """Return a message with tool calls, as the replica parses it."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in called]
    found = [{"id": f"call_{number}", "function": each} for number, each in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": found}


def asked(wiki: Any, name: str, arguments: str) -> str:
    """Return the result of a tool."""
    turn = wiki.reset(Task("0", QUESTION), 0).step(calls((name, arguments)))
    (message,) = turn.messages
    assert (message["role"], message["tool_call_id"], turn.done) == ("tool", "call_0", False)
    return message["content"]


@pytest.mark.parametrize(
    ("query", "first", "others"),
    [
        ("Mur drums", "Borton", ["Aldorf"]),
        ("bells Mur", "Aldorf", ["Borton", "Calwen"]),
        ("esk", "Calwen", []),
        ("nothing found there then", "Aldorf", []),
        ("a river", "nothing found", []),
        ('"Mur" NEAR (bells* NOT -title:', "Aldorf", ["Borton", "Calwen"]),
        ("", "nothing to search for: give a word", []),
        ("?!", "nothing to search for: give a word", []),
    ],
)
def test_a_search_gives_titles_the_best_first(wiki: Any, query: str, first: str, others: list[str]) -> None:
    best, *rest = asked(wiki, "search", json.dumps({"query": query})).split("\n")
    assert (best, sorted(rest)) == (first, others)


def test_a_title_gives_its_article(wiki: Any) -> None:
    assert asked(wiki, "read", '{"title": "Borton"}') == ARTICLES[1]["text"]
    assert asked(wiki, "read", '{"title": "borto"}') == "no such article"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("search", "{", "the arguments are not JSON"),
        ("search", "[]", "there are search(query) and read(title)"),
        ("search", '{"title": "Aldorf"}', "there are search(query) and read(title)"),
        ("search", '{"query": 5}', "there are search(query) and read(title)"),
        ("write", '{"title": "Aldorf"}', "there are search(query) and read(title)"),
    ],
)
def test_a_bad_call_is_told_what_is_wrong(wiki: Any, name: str, arguments: str, said: str) -> None:
    assert asked(wiki, name, arguments) == said


def answered(wiki: Any, answer: str, *before: dict[str, Any]) -> Turn:
    episode = wiki.reset(Task("0", QUESTION), 0)
    for each in before:
        assert not episode.step(each).done
    return episode.step({"role": "assistant", "content": answer})


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Ada Brill", 1),
        (" the ada  brill.", 1),
        ("It says Ada Young first.\nAnswer: Ada Brill", 1),
        ("Ada", 0),
        ("Ada Brill or Max", 0),
        ("", 0),
    ],
)
def test_the_right_answer_is_worth_1_whatever_case_and_punctuation(wiki: Any, answer: str, reward: float) -> None:
    turn = answered(wiki, answer)
    assert (turn.reward, turn.done, turn.truncated) == (reward, True, False)


def test_what_was_read_and_how_often_a_tool_was_called_is_logged(wiki: Any) -> None:
    assert answered(wiki, "Ada Brill").metrics == {"found": 0, "calls": 0}
    two = calls(("search", '{"query": "Mur"}'), ("read", '{"title": "Borton"}'))
    assert answered(wiki, "Ada Brill", two).metrics == {"found": 0, "calls": 2}
    assert answered(wiki, "Ada Brill", two, calls(("read", '{"title": " Aldorf"}'))).metrics == {"found": 1, "calls": 3}


def test_an_episode_that_never_answers_ends_with_nothing(wiki: Any) -> None:
    episode = wiki.reset(Task("0", QUESTION), 0)
    search = calls(("search", '{"query": "Mur"}'))
    turns = [episode.step(search)]
    while not turns[-1].done:
        turns.append(episode.step(search))
    assert (len(turns), turns[-1].reward, turns[-1].truncated) == (9, 0, True)


def test_a_system_message_comes_first_if_there_is_one(tmp_path: Path, wiki: Any) -> None:
    assert [each["role"] for each in wiki.reset(Task("0", QUESTION), 0).messages] == ["user"]
    told = load_environment(f"{EXAMPLE / 'env.py'}:WikiSearch", {"directory": str(tmp_path), "system": "Look it up."})
    assert [each["role"] for each in told.reset(Task("0", QUESTION), 0).messages] == ["system", "user"]


def example(written: Path) -> Any:
    return load_environment(f"{EXAMPLE / 'env.py'}:WikiSearch", {"directory": str(written)})


def test_no_article_is_both_trained_on_and_held_out(written: Path) -> None:
    made = example(written)
    held_out = {task.data["title"] for task in made.tasks("eval", 0)}
    trained = {task.data["title"] for seed in range(3) for task in made.tasks("train", seed)}
    assert len(held_out) >= 40
    assert not held_out & trained
    assert made.tasks("train", 1) == made.tasks("train", 1) != made.tasks("train", 2)
    assert made.tasks("eval", 1) == made.tasks("eval", 2)
    with pytest.raises(ValueError, match="train and eval"):
        made.tasks("test", 0)


def test_two_words_of_the_question_find_the_article_and_one_seldom_does(written: Path) -> None:
    made, found = example(written), {"one": 0, "two": 0}
    tasks = [*made.tasks("train", 0), *made.tasks("eval", 0)]
    for task in tasks:
        words = task.data["question"].replace("?", "").replace(" founded", "").split()
        river, good = words[words.index("known") - 1], words[words.index("for") + 1]
        for name, query in (("one", river), ("two", f"{river} {good}")):
            episode = made.reset(task, 0)
            (message,) = episode.step(calls(("search", json.dumps({"query": query})))).messages
            first = message["content"].split("\n")[0]
            (article,) = episode.step(calls(("read", json.dumps({"title": first})))).messages
            found[name] += first == task.data["title"]
            assert (task.data["answer"] in article["content"]) or name == "one"
    assert found["two"] == len(tasks)
    assert found["one"] < 0.1 * len(tasks)


def test_demonstrations_read_no_article_that_is_held_out_nor_one_of_the_run(written: Path, monkeypatch) -> None:
    rows = [json.loads(line) for line in (written / "demonstrations.jsonl").read_text().splitlines()]
    of_the_run = {each["text"] for each in map(json.loads, (written / "articles.jsonl").read_text().splitlines())}
    held_out = {task.data["title"] for task in example(written).tasks("eval", 0)}
    hasty = 0
    for row in rows:
        asked, search, _, reading, article, answer = row["messages"]
        assert asked["role"] == "user"
        (query,) = search["tool_calls"][0]["function"]["arguments"].values()
        (title,) = reading["tool_calls"][0]["function"]["arguments"].values()
        assert title not in held_out
        assert article["content"] not in of_the_run
        assert f" {answer['content']}." in article["content"]
        hasty += " " not in query
    assert 0.4 < hasty / len(rows) < 0.6
    first = next(islice(demonstrations(monkeypatch).demonstrations(0), 1))
    assert json.loads(json.dumps(first)) == rows[0], "the seed decides"


def demonstrations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import them as the command does, with the modules beside them."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    names = ("env", "articles", "demonstrations")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module("demonstrations")
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return found


@pytest.mark.parametrize("files", [["rl.toml"], ["rl.toml", "gpu.toml"]], ids=["cpu", "gpu"])
def test_the_settings_of_a_run_are_valid(files: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 32768}))
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS)
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.chdir(ROOT)
    settings = [word for file in files for word in ("@", f"examples/wiki_search/{file}")]
    with pytest.raises(SystemExit) as stopped:
        run([*settings, "--model", str(tmp_path), "--dry-run"])
    assert stopped.value.code == 0
    assert tomllib.loads(capsys.readouterr().out)["rollout"]["engine"] == ("transformers", "vllm")[len(files) - 1]


def test_an_evaluation_asks_held_out_questions_as_the_run_asks_its_own(written: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["@", "examples/wiki_search/eval.toml", "--model", "a/b"]
    told = load_command(EvalConfig, words, "eval", check=check_evaluation)
    trained = tomllib.loads((EXAMPLE / "rl.toml").read_text())["orchestrator"]
    assert told.split == "eval"
    assert (told.environment, told.environment_args) == (trained["environment"], trained["environment_args"])
    assert told.prompts <= len(example(written).tasks("eval", 0))
