"""docs/extending.md is true: its files are written, its commands print what it shows, its mistakes give its messages."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.rollout_stack import RUN, Replica, running_engine  # type: ignore[import-not-found]
from small_models import recompute  # type: ignore[import-not-found]

from agents_svc.player import load_agent
from orchestrator_svc.config import EpisodeConfig
from orchestrator_svc.run.workflows import GroupRunner, Sampling, choose_workflow
from sluice.cli.main import main
from sluice.config import ConfigError, SecurityConfig
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.formats import Format, find_format
from sluice.environments.loading import load_environment
from sluice.environments.processes import EnvironmentProcesses
from sluice.loading import construct
from sluice.rpc import SluiceError
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import ReplicaPool
from sluice.v1 import orchestrator_pb2
from sluice.versions import BASE, Version
from trainer_svc.objectives.evaluate import Case, evaluate
from trainer_svc.service.batches import Expectations, convert

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()

FILES = dict(re.findall(r"^`([^`\n]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
"""Whole files by their paths."""

EDITS: list[tuple[str, str, str, str]] = re.findall(
    r"^(In|Before) `(\w+)`(?: of| in) `([^`]+)`:\n\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
)
"""Changes of files of a checkout: where, the name of a table in it, the file, the lines."""

SECTIONS = {text.split("\n", 1)[0]: text for text in PAGE.split("\n## ")}
IN_CHECKOUT = "An engine"
"""The section whose files and commands belong to a checkout."""

COPIED = ("sluice", "rollout_svc", "tests", "docs", "examples/sums")
NOT_COPIED = shutil.ignore_patterns("__pycache__", "node_modules", "examples")

LIMIT_S = 240

HERE = re.compile(r"(PYTHONPATH=\. )?(?:(printf '[^']*') \| )?sluice ((?:init-model|objective|env) .*)")
"""Commands that need no process of their own, and import nothing that the page changes of a checkout."""

REPLICA = "--model tiny --engine transformers"
"""What starts a replica in commands of the page."""

SUITE = "pytest -q tests/contract/test_engine_conformance.py -k seeded"
"""The tests of engines, on the page's own."""


@dataclass(frozen=True)
class Command:
    """A command of the page, and the output that the page shows."""

    section: str
    line: str
    output: str

    @property
    def slow(self) -> bool:
        return "sluice env" not in self.line or self.section == IN_CHECKOUT


def commands() -> Iterator[Command]:
    for section, text in SECTIONS.items():
        for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE):
            for each in ("\n" + block).split("\n    $ ")[1:]:
                line, _, output = each.partition("\n")
                yield Command(section, line, output)


COMMANDS = list(commands())
PREPARE = COMMANDS[0]
"""Makes the model that the other commands use."""


def run_in(directory: Path, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command as the page has it, with the programs of this interpreter."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    ran = subprocess.run(
        line, shell=True, cwd=directory, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ran.returncode == 0, f"{line}\n{ran.stdout}{ran.stderr}"
    return ran


def run_here(directory: Path, line: str) -> str:
    """Run a command of `HERE` in this process; return its output."""
    found = HERE.fullmatch(line)
    assert found is not None
    path, printf, words = found.groups()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(directory)
        patch.setattr(sys, "path", [str(directory), *sys.path] if path else [*sys.path])
        patch.delitem(sys.modules, "my_losses", raising=False)
        patch.setattr(sys, "stdin", io.StringIO(run_in(directory, printf).stdout if printf else ""))
        assert main(shlex.split(words)) == 0, line
    return printed.getvalue()


def prints(shown: str, printed: str) -> bool:
    """Return whether the output matches the page, where `...` stands for any text and all white space is equal."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(f"{shown}\n", f"{printed}\n", flags)


def write_files(directory: Path, *, of_checkout: bool) -> None:
    for name, text in FILES.items():
        if (name in SECTIONS[IN_CHECKOUT].split("`")) is of_checkout:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files of the page, and nothing loaded of them."""
    write_files(tmp_path, of_checkout=False)
    monkeypatch.chdir(tmp_path)
    # Files beside one that was named can be imported from then on: only in this test.
    monkeypatch.setattr(sys, "path", [each for each in sys.path if Path(each).resolve() != tmp_path.resolve()])
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a reader has it."""
    directory = tmp_path_factory.mktemp("place")
    write_files(directory, of_checkout=False)
    assert prints(PREPARE.output, run_here(directory, PREPARE.line))
    return directory


@pytest.fixture(scope="module")
def replica(place: Path) -> Iterator[str]:
    """The address of what `REPLICA` starts, in this process and started once."""
    started: Future[str] = Future()
    over = threading.Event()

    async def serve() -> None:
        model = place / "tiny"
        async with running_engine(model) as engine, Replica(model, engine) as serving:
            started.set_result(serving.target)
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield started.result(LIMIT_S)
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files of a checkout that the section on engines needs, and make the changes of that section."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in COPIED:
        shutil.copytree(ROOT / name, directory / name, ignore=NOT_COPIED)
    shutil.copy(ROOT / "pyproject.toml", directory)
    write_files(directory, of_checkout=True)
    for where, table, name, lines in EDITS:
        path = directory / name
        before, line, after = re.split(rf"^({table}: .*)$", path.read_text(), maxsplit=1, flags=re.MULTILINE)
        if where == "Before":
            text = f"{before}{lines}\n\n{line}{after}"
        elif line.endswith("}"):
            text = f"{before}{line.removesuffix('}')}, {lines.strip()}}}{after}"
        else:
            rows, end, rest = after.partition("\n}\n")
            text = f"{before}{line}{rows}\n{lines.rstrip()}{end}{rest}"
        path.write_text(text)
    return directory


def cases() -> Iterator[Any]:
    """Yield each command as `make test` runs it. If that is a shorter form, also yield the whole command, marked `soak`."""
    for number, each in enumerate(COMMANDS[1:]):
        marks = [pytest.mark.slow] if each.slow else []
        kind = f"{number} {each.line[:40]}"
        yield pytest.param(each, shorter(each), id=kind, marks=marks)
        if shorter(each) != each.line:
            yield pytest.param(each, each.line, id=f"{kind}, whole", marks=[*marks, pytest.mark.soak])


def shorter(command: Command) -> str:
    """A command as `make test` runs it: with a replica that is there, and with one class of the tests of engines."""
    if command.line == SUITE:
        return f"{SUITE.removesuffix('seeded')}'seeded and TestSampling'"
    return command.line.replace(REPLICA, f"--address {{replica}} --run {RUN}")


@pytest.mark.parametrize(("command", "line"), list(cases()))
def test_each_command_prints_what_the_page_shows(command: Command, line: str, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue("checkout" if command.section == IN_CHECKOUT else "place")
    shown = command.output
    if command.section == IN_CHECKOUT:
        if " --model models/tiny" in line and not (place / "models/tiny").exists():
            run_here(place, "sluice init-model models/tiny")
        elif "init-model" in line:
            shutil.rmtree(place / "models", ignore_errors=True)
    if "{replica}" in line:
        address = request.getfixturevalue("replica")
        line = line.format(replica=address)
        shown = shown.replace("tiny on", f"{address} on")
    if HERE.fullmatch(line):
        printed = run_here(place, line)
    else:
        own = {"PYTHONPATH": str(place)} if command.section == IN_CHECKOUT else {}
        printed = run_in(place, line, **own).stdout
    assert prints(shown, printed), f"{line}\n{printed}"


def test_what_has_a_shorter_command_is_on_the_page() -> None:
    assert sum(shorter(each) != each.line for each in COMMANDS) == 3
    assert '`-k "seeded and TestSampling"`' in PAGE


def test_every_section_on_something_to_add_has_a_command() -> None:
    wanted = set(re.findall(r"\[[a-z ]+\]\(#(an?-[a-z-]+)\)", PAGE))
    assert len(wanted) == 7
    tried = {re.sub(r"[^a-z]+", "-", each.section.lower()) for each in COMMANDS}
    assert wanted <= tried


@pytest.mark.slow
def test_the_page_of_settings_names_the_engine(checkout: Path) -> None:
    run_in(checkout, "sluice config docs --output docs/configuration.md", PYTHONPATH=str(checkout))
    assert r'"transformers" \| "seeded"' in (checkout / "docs/configuration.md").read_text()


SETTINGS = [text for text in re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE) if text.startswith("    [")]


@pytest.mark.parametrize("settings", SETTINGS, ids=[each.split("\n")[0].strip() for each in SETTINGS])
def test_settings_of_the_page_are_those_of_a_run(settings: str, files: Path, place: Path) -> None:
    text = re.sub(r"^    ", "", settings, flags=re.MULTILINE)
    (files / "some.toml").write_text(text)
    words = ["--model", str(place / "tiny"), "--rollout.engine", "transformers", "--dry-run"]
    if "environment" not in tomllib.loads(text).get("orchestrator", {}):
        words += ["--orchestrator.environment", "vowels.py:Vowels"]
    with pytest.raises(SystemExit) as ended:  # a wrong setting is a ConfigError, which `main` prints
        main(["rl", "@", "some.toml", *words])
    assert ended.value.code == 0


def test_a_package_gives_its_environments_and_formats_names(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads(FILES["pyproject.toml"])
    assert {f"{each}.py" for each in project["tool"]["setuptools"]["py-modules"]} <= FILES.keys()
    installed = files / "my_tasks-0.1.dist-info"  # as an installer writes it
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-tasks\nVersion: 0.1\n")
    groups = project["project"]["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(files))
    for name in ("vowels", "my_formats"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert load_environment("vowels", {"partial": 0.3}).partial == 0.3
    found = find_format("my_sums")
    assert isinstance(found, Format)
    assert found.read({"terms": [1, 2], "level": 1}) == {"question": "What is 1 + 2?", "answer": 3}
    assert found.read({"terms": [1, 2], "level": 2}) is None


def test_the_objective_has_a_finite_loss_and_gradient_on_a_batch(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(files))
    torch.manual_seed(0)
    sequences = [
        {"logp": (-torch.rand(n)).tolist(), "behaviour_logp": (-torch.rand(n)).tolist(), "advantage": a}
        for n, a in ((3, 1.0), (5, -1.0), (1, 0.0))
    ]
    case = Case.parse(json.dumps({"preset": "my_losses:gentle", "sequences": sequences}))
    result = evaluate(case)
    gradients = [value for each in result["grad"] for value in each]
    assert all(map(math.isfinite, [result["loss"], *gradients]))
    assert all(value < 0 for value in gradients[:3])
    assert all(value > 0 for value in gradients[3:8])
    assert gradients[8] == 0


class CountsDown(BaseHTTPRequestHandler):
    """An endpoint that says 3, then 2, and so on: a number less with each answer in the conversation."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"]
        said = 3 - sum(each["role"] == "assistant" for each in asked)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": str(said)}}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Print nothing."""


@pytest.mark.parametrize(("vowels", "reward"), [(3, 1.0), (2, 0.5), (1, 0.0)])
async def test_the_agent_gives_less_for_a_second_try(vowels: int, reward: float, files: Path) -> None:
    agent = construct("my_agent.py:Doubter", "agent", {"turns": 2}, "agents.args")
    with ThreadingHTTPServer(("127.0.0.1", 0), CountsDown) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            async with agent.client:
                url = f"http://127.0.0.1:{server.server_port}/v1"
                played = await agent.run(data={"word": "idea", "vowels": vowels}, base_url=url, api_key="key")
        finally:
            server.shutdown()
            serving.join()
    assert played == reward


# Mistakes.


@dataclass(frozen=True)
class Mistake:
    """A change of the page's files, or of a command, that gives a message of the page."""

    message: str
    words: tuple[str, ...]
    changes: dict[str, tuple[str, str]] = field(default_factory=dict)
    importable: bool = False


def case(message: str, old: str, new: str, *, importable: bool = True) -> Mistake:
    return Mistake(message, ("objective", "--case", "case.json"), {"case.json": (old, new)}, importable)


def loss(message: str, old: str, new: str) -> Mistake:
    return Mistake(message, ("objective", "--case", "case.json"), {"my_losses.py": (old, new)}, importable=True)


def tried(message: str, name: str, *changes: str, **more: str) -> Mistake:
    given = {"vowels.py": (changes[0], changes[1])} if changes else {}
    return Mistake(message, ("env", "try", name, *(f"{key}={value}" for key, value in more.items())), given)


def asked(message: str, *words: str, changes: dict[str, tuple[str, str]] | None = None) -> Mistake:
    return Mistake(message, ("env", "try", "question_answer", *words), changes or {})


def sampled(message: str, workflow: str, changes: dict[str, tuple[str, str]] | None = None) -> Mistake:
    words = ("eval", "--address", "127.0.0.1:1", "--environment", "vowels.py:Vowels", "--workflow", workflow)
    return Mistake(message, words, changes or {})


VOWELS, SCORE = "vowels.py:Vowels", "return Score(1.0 if right else self.partial * answer.isdecimal(), "
NEAR = ("dataset=questions.jsonl", "reward=my_rewards.py:near")
ROW = '{"question": "How many legs has an ant?"'
MISTAKES = [
    case(
        "objective 'my_losses:gentle': there is no module 'my_losses': install it, or put its directory on PYTHONPATH",
        "gentle",
        "gentle",
        importable=False,
    ),
    case("objective 'my_losses.py:gentle': there is no module 'my_losses.py': ...", "my_losses", "my_losses.py"),
    case("has no function 'gentel': correct the name", "gentle", "gentel"),
    case(
        "is called with the terms of a micro-batch and params (positive): got an unexpected keyword argument 'positive';"
        " correct params or the function",
        '"negative"',
        '"positive"',
    ),
    loss(
        "returned shape () for 3 tokens: return one loss per token and leave the aggregation to the config",
        "negative * loss), ",
        "negative * loss).mean(), ",
    ),
    loss(
        "returned a Tensor: return one loss per token and a dict of sums to report, such as `return loss, {}`",
        ', {"softened": below.sum()}',
        "",
    ),
    tried(
        'messages(task): give a list of messages such as {"role": "user", "content": "..."}, not ...',
        VOWELS,
        '[{"role": "user", "content": f"How many vowels are in {task.data[\'word\']}? Answer with a number."}]',
        '"How many?"',
    ),
    tried(
        "no environment 'vowels.py' is installed; there are: ...; or give module:Attr or path/to/env.py:Attr",
        "vowels.py",
    ),
    tried("vowels.py has no 'Vowel'; it defines Vowels", "vowels.py:Vowel"),
    tried(
        "environment vowels.py:Vowels refuses its environment_args (partail): ...got an unexpected keyword argument 'partail'",
        VOWELS,
        partail="1",
    ),
    tried(
        "vowels.py:Vowels is not an environment, since it has no name: it needs name, tasks(split, seed), and either messages(task) with"
        " score(task, completion), or reset(task, seed); ...",
        VOWELS,
        '    name = "vowels"\n',
        "",
    ),
    tried(
        "environment vowels leaves its episodes to agents: it has neither `reset`, nor `messages` with `score`",
        VOWELS,
        "def score(",
        "def scored(",
    ),
    tried(
        "value.tasks[0].data.day is of type date; str, int, float, bool, None, lists and dicts with keys of type str"
        " can leave the environment's process",
        VOWELS,
        '"word": word, ',
        '"word": word, "day": __import__("datetime").date(2030, 1, 1), ',
    ),
    tried("a reward of score is 'good' (str), not a number", VOWELS, SCORE, 'return "good"; ('),
    asked(
        "reward 'near' is neither installed nor of the form module:Attr or path/to/file.py:Attr", NEAR[0], "reward=near"
    ),
    asked("there is no reward file ...my_reward.py (relative paths start at ...)", NEAR[0], "reward=my_reward.py:near"),
    asked(
        "near() takes 1 positional argument but 2 were given",
        *NEAR,
        changes={"my_rewards.py": ("(completion, answer)", "(completion)")},
    ),
    asked(
        "what the reward my_rewards.py:near returned is '1' (str), not a number",
        *NEAR,
        changes={"my_rewards.py": ("return 1 / (1 + distance)", "return '1'")},
    ),
    asked(
        "cannot read questions.txt: its name ends with none of .jsonl, .ndjson, .json, .csv, .parquet, .arrow, ...",
        "dataset=questions.txt",
    ),
    asked(
        "line 1 of questions.jsonl is not JSON: ...",
        NEAR[0],
        changes={"questions.jsonl": ('"answer": "8"}', '"answer": "8"')},
    ),
    asked(
        "line 1 of questions.jsonl, with the fields q, answer, does not fit: it has no field 'question'; correct the row, or"
        " set environment_args question and answer to the fields, or a format that leaves the row out",
        NEAR[0],
        changes={"questions.jsonl": ('{"question": "How many legs has a spider?"', '{"q": "?"')},
    ),
    asked(
        "line 1 of ..., with the fields terms, level, does not fit: a sum needs two terms, not 1; ...",
        "dataset=sums",
        "format=my_formats.py:SUMS",
        changes={"sums/train.jsonl": ("[3, 5]", "[3]")},
    ),
    asked(
        "sums has no split 'dev': it needs a file such as dev.jsonl or dev.parquet; there is test.jsonl, train.jsonl",
        "dataset=sums",
        "format=my_formats.py:SUMS",
        "--split",
        "dev",
    ),
    asked(
        "there is no format 'sums'; there are gsm8k, hendrycks_math, and functions as path/to/file.py:function",
        "dataset=sums",
        "format=sums",
    ),
    sampled("workflow 'spread' is neither installed nor of the form module:Attr or path/to/file.py:Attr", "spread"),
    sampled(
        "workflow my_workflow.py:Spread has no method arun_episode(engine, data): add it, or name another class",
        "my_workflow.py:Spread",
        {"my_workflow.py": ("def arun_episode", "def run_episode")},
    ),
    sampled(
        "workflow my_workflow.py:Spread is constructed with the environment and the settings: ...",
        "my_workflow.py:Spread",
        {"my_workflow.py": ("def __init__(self, environment, config)", "def __init__(self, environment)")},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.message[:60])
def test_a_mistake_gives_the_message_of_the_page(
    mistake: Mistake, files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, (old, new) in mistake.changes.items():
        text = (files / name).read_text()
        assert old in text, "the page has changed: change the mistake with it"
        (files / name).write_text(text.replace(old, new))
    shutil.copy(files / "questions.jsonl", files / "questions.txt")
    if mistake.importable:
        monkeypatch.syspath_prepend(str(files))
    monkeypatch.setattr("sys.stdin", io.StringIO("3\n\n"))
    code = main(list(mistake.words))
    captured = capfd.readouterr()
    assert prints(f"...{mistake.message}...", captured.err + captured.out), captured
    assert mistake.message in PAGE
    if not code:
        assert captured.out.rstrip().endswith("reward missing")
        assert "scoring failed" in captured.err


AGENT_MISTAKES = [
    (
        "agent 'my_agent.py' is neither installed nor of the form module:Attr or path/to/file.py:Attr",
        "my_agent.py",
        "run",
        {},
    ),
    (
        "agent my_agent.py:Doubter has neither `run(self, data, base_url, api_key)` nor `async def arun_episode(self, engine, task)`: give it one of them",
        "my_agent.py:Doubter",
        "play",
        {},
    ),
    (
        "agent my_agent.py:Doubter refuses its agents.args (turn): ...got an unexpected keyword argument 'turn'",
        "my_agent.py:Doubter",
        "run",
        {"turn": 3},
    ),
]


@pytest.mark.parametrize(("message", "name", "method", "arguments"), AGENT_MISTAKES)
def test_an_agent_that_cannot_play_gives_the_message_of_the_page(
    message: str, name: str, method: str, arguments: dict[str, Any], files: Path
) -> None:
    (files / "my_agent.py").write_text(FILES["my_agent.py"].replace("def run(", f"def {method}("))
    with pytest.raises(ConfigError) as refused:
        load_agent(name, arguments)
    assert prints(message, str(refused.value))
    assert message in PAGE


ENGINE_MISTAKES = [
    ("rollout.engine: must be 'vllm', 'transformers' or 'seeded'; got 'seded'", "seded", "transformers"),
    (
        "rollout.engine is seeded, but ... is not installed here: install it, or set rollout.engine to transformers or vllm",
        "seeded",
        "no_such_library",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("message", "engine", "library"), ENGINE_MISTAKES)
def test_an_engine_that_cannot_start_gives_the_message_of_the_page(
    message: str, engine: str, library: str, checkout: Path, place: Path
) -> None:
    table = checkout / "sluice/engines.py"
    whole = table.read_text()
    table.write_text(whole.replace('engines.seeded", "transformers"', f'engines.seeded", "{library}"'))
    line = f"sluice rl @ run.toml --model tiny --rollout.engine {engine} --dry-run 2>&1 || true"
    try:
        printed = run_in(place, line, PYTHONPATH=str(checkout)).stdout
    finally:
        table.write_text(whole)
    assert prints(f"...{message}...", printed), printed
    assert message in PAGE


IN_A_RUN = {
    "the workflow gave its trajectories the names first: give each one of its own that begins with group_id and a hyphen, such as ...": (
        'trajectory_id=f"{data.group_id}-{index}"',
        'trajectory_id="first"',
    ),
    "trajectories[0].logprobs has ... values; give 0 or ..., as ... tokens are trained": (
        "logprobs=sample.logprobs",
        "logprobs=sample.logprobs[1:]",
    ),
    "trajectories[0].mask_runs add up to ..., but there are ... tokens": (
        "mask_runs=[len(answer.prompt_token_ids), ",
        "mask_runs=[1, ",
    ),
}
"""Messages to a workflow whose records are wrong, with the change that gives them."""

OF_OTHERS = {
    "async def functions are not natively supported.": "pytest",
    "'slwo' not found in `markers` configuration option": "pytest",
    "Task exception was never retrieved": "asyncio",
    "scoring failed": "stands before a message that is tried",
    "the episode is given up": "an outcome",
    "run `.venv/bin/sluice config docs --output docs/configuration.md` and commit it": "test_architecture.py",
    "test_every_test_module_has_a_name_of_its_own": "test_architecture.py",
}
"""What the tables of mistakes name besides, and whose message it is."""


def test_every_message_of_the_tables_of_mistakes_is_tried() -> None:
    rows = [
        row
        for table in re.findall(r"\| mistake \| message \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE)
        for row in table.splitlines()
    ]
    tried_messages = {each.message for each in MISTAKES} | {each[0] for each in (*AGENT_MISTAKES, *ENGINE_MISTAKES)}
    known = tried_messages | IN_A_RUN.keys() | OF_OTHERS.keys()
    untried = [row for row in rows if not any(message in row for message in known) and "| none:" not in row]
    assert not untried
    architecture = (ROOT / "tests/unit/test_architecture.py").read_text()
    assert all(text in architecture for text, owner in OF_OTHERS.items() if owner == "test_architecture.py")


# The workflow against a real engine.


@contextlib.asynccontextmanager
async def policy_of(model: Path) -> AsyncIterator[PolicyEngine]:
    """Return the policy that a workflow samples with: a replica over gRPC, with its engine in this process."""
    async with running_engine(model) as engine, Replica(model, engine) as replica:
        pool = ReplicaPool([replica.target], SecurityConfig(), ReplicasConfig(poll_s=0.05), lambda _: None)
        polling = asyncio.create_task(pool.run())
        try:
            yield PolicyEngine(pool, "test", 60.0)
        finally:
            polling.cancel()
            await asyncio.wait({polling})


async def records_of(workflow: str, model: Path) -> list[orchestrator_pb2.TrajectoryRecord]:
    processes = EnvironmentProcesses(VOWELS, {}, EnvironmentProcessesConfig(count=1), (60.0, "start_s"))
    async with policy_of(model) as engine, processes as environment, asyncio.timeout(60):
        chosen = choose_workflow(EpisodeConfig(workflow=workflow), environment)
        runner = GroupRunner(chosen, engine, 0, request_prefix="")
        (task, *_) = await environment.tasks("train", 0)
        sampling = Sampling(temperature=1.0, max_tokens=8, ignore_eos=True)
        return [each.whole() for each in await runner.run(task, "g1", 4, sampling, BASE)]


def faults_of(records: list[orchestrator_pb2.TrajectoryRecord]) -> list[str]:
    """Return the faults that the trainer finds in the trajectories."""
    expected = Expectations(vocabulary=128, newest=Version(1, 0), has_estimator=True)
    _, faults = convert([each.trajectory for each in records], expected)
    return [f"{place} {fault}" for place, fault in faults.items()]


async def test_the_workflow_makes_trajectories_that_are_what_was_sampled(files: Path, place: Path) -> None:
    records = await records_of("my_workflow.py:Spread", place / "tiny")
    assert [each.trajectory.temperature for each in records] == pytest.approx([0.625, 0.75, 0.875, 1.0])
    assert not faults_of(records)
    for record in records:
        made = record.trajectory
        ids, (context, count) = list(made.token_ids), made.mask_runs
        assert (context + count, count) == (len(ids), 8)
        of_the_policy = recompute(place / "tiny", ids[:context], ids[context:], made.temperature)
        torch.testing.assert_close(torch.tensor(list(made.logprobs)), of_the_policy, atol=1e-4, rtol=0.0)
        assert made.HasField("reward"), "the environment has scored the last message"
        assert [each.role for each in record.conversation.messages] == ["user", "assistant"]


@pytest.mark.slow
@pytest.mark.parametrize("message", IN_A_RUN)
async def test_wrong_records_of_a_workflow_give_the_message_of_the_page(message: str, files: Path, place: Path) -> None:
    old, new = IN_A_RUN[message]
    text = FILES["my_workflow.py"]
    assert old in text, "the page has changed: change the mistake with it"
    (files / "my_workflow.py").write_text(text.replace(old, new))
    try:
        found = faults_of(await records_of("my_workflow.py:Spread", place / "tiny"))
    except SluiceError as error:
        found = [error.message]
    assert any(prints(f"{message}...", each) for each in found), found
    assert message in PAGE
