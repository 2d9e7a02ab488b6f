"""wiki_search: a question whose answer is in one of many articles; the model searches them and reads with two tools.

The articles and questions are two files, so that others can take the place of those that `articles.py` writes.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sqlite3
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sluice.environments import Message, Task, Turn

__all__ = ["TOOLS", "Index", "Lookup", "WikiSearch", "held_out", "read_lines"]

HELD_OUT_SHARE = 4
"""One article in four is held out for evaluation: no question to train on is about it. It can be found, as all can."""

MOST_CALLS = 8
"""Tool calls of an episode; one that asks for more has not answered, and gets 0."""

WORD = re.compile(r"\w+")


def tool(name: str, parameter: str, description: str) -> Message:
    """Return what the model is told of a tool with one text parameter."""
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (tool("search", "query", "Titles, best first."), tool("read", "title", "An article."))


class Index:
    """Articles in a full-text index of SQLite, in memory.

    Args:
        articles: Mappings with ``title`` and ``text``.
        results: Titles that a search returns at most.
    """

    def __init__(self, articles: Iterable[Mapping[str, str]], results: int = 3) -> None:
        self._results = results
        self._texts = {article["title"]: article["text"] for article in articles}
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE articles USING fts5(title, text)")
        self._index.executemany("INSERT INTO articles VALUES (?, ?)", self._texts.items())

    def search(self, query: str) -> str:
        """Return the titles of the articles with any of the words, the best first (BM25), a line each."""
        words = " OR ".join(f'"{word}"' for word in WORD.findall(query))
        if not words:
            return "nothing to search for: give a word"
        chosen = "SELECT title FROM articles WHERE articles MATCH ? ORDER BY rank, rowid LIMIT ?"
        found = self._index.execute(chosen, (words, self._results)).fetchall()
        return "\n".join(title for (title,) in found) or "nothing found"

    def read(self, title: str) -> str:
        """Return an article."""
        return self._texts.get(title.strip(), "no such article")


class WikiSearch:
    """The environment.

    Args:
        directory: Has ``articles.jsonl``, lines with ``title`` and ``text``, and ``questions.jsonl``, lines with ``question``,
            ``answer`` and the ``title`` of the article that has the answer.
        system: System message; none if empty.
        results: Titles that a search returns at most.
    """

    name = "wiki_search"

    def __init__(self, directory: str = "outputs/wiki_search_model", *, system: str = "", results: int = 3) -> None:
        self._questions = read_lines(Path(directory) / "questions.jsonl")
        self._index = Index(read_lines(Path(directory) / "articles.jsonl"), results)
        self._system = system

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return the questions of a split. The held-out ones are in the same order for every seed, so that runs compare.

        Args:
            split: ``train`` or ``eval``.
            seed: Seed of the order.

        Raises:
            ValueError: if there is no such split.
        """
        if split not in {"train", "eval"}:
            raise ValueError(f"wiki_search has the splits train and eval, not {split!r}")
        found = [
            Task(str(number), dict(each))
            for number, each in enumerate(self._questions)
            if held_out(each["title"]) == (split == "eval")
        ]
        random.Random(f"wiki_search/{split}/{seed if split == 'train' else 0}").shuffle(found)  # noqa: S311 - an order
        return found

    def reset(self, task: Task, seed: int) -> Lookup:
        """Begin an episode."""
        return Lookup(self._index, task.data, self._system)


class Lookup:
    """An episode: answers calls from the index, and takes the first text as the answer."""

    tools = TOOLS

    def __init__(self, index: Index, asked: Mapping[str, Any], system: str) -> None:
        before = [{"role": "system", "content": system}] if system else []
        self.messages = [*before, {"role": "user", "content": asked["question"]}]
        self._index, self._asked = index, asked
        self._calls, self._found = 0, False

    def step(self, said: Message, last: bool = False) -> Turn:
        """Answer the calls of a turn, or give 1 for the right answer, else 0: also to calls in the `last` turn."""
        calls = said.get("tool_calls") or []
        self._calls += len(calls)
        if calls and self._calls <= MOST_CALLS and not last:
            return Turn(messages=[self._result(call) for call in calls])
        right = not calls and plain(said["content"] or "") == plain(self._asked["answer"])
        metrics = {"found": float(self._found), "calls": float(self._calls)}
        return Turn(reward=float(right), done=True, truncated=bool(calls), metrics=metrics)

    def _result(self, call: Message) -> Message:
        return {"role": "tool", "tool_call_id": call["id"], "content": self._run(call["function"])}

    def _run(self, function: Mapping[str, str]) -> str:
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            return "the arguments are not JSON"
        match function["name"], arguments:
            case "search", {"query": str(query)}:
                return self._index.search(query)
            case "read", {"title": str(title)}:
                self._found |= title.strip() == self._asked["title"]
                return self._index.read(title)
        return "there are search(query) and read(title)"


def plain(answer: str) -> str:
    """Return what counts of an answer: what follows the last ``Answer:``, if there is one, without case, articles and punctuation."""
    said = answer.lower().rpartition("answer:")[2]
    words = said.translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in {"a", "an", "the"})


def held_out(title: str) -> bool:
    """Return whether an article is held out, by the digest of its title."""
    return hashlib.blake2b(title.encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0


def read_lines(path: Path) -> list[dict[str, str]]:
    """Return the rows of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
