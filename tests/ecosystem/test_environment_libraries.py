"""Environments of other libraries, each in a virtual environment of its own: what they pose and score, and runs that train on them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.processes import EnvironmentProcesses
from sluice.rpc.server import free_ports

ROOT = Path(__file__).parents[2]
SLUICE = (sys.executable, "-m", "sluice.cli.main")

STEPS, TASKS, ATTEMPTS = 2, 4, 4


def python_of(name: str) -> str:
    """Return the interpreter of a virtual environment; skip if `make install-ecosystem` has not made it."""
    python = ROOT / f".venv-ecosystem-{name}/bin/python"
    if not python.exists():
        pytest.skip(f"{python.parent.parent.name} is not there: run `make install-ecosystem`")
    return str(python)


pytestmark = [pytest.mark.ecosystem, pytest.mark.slow, pytest.mark.timeout(300)]


def processes(name: str, **arguments: object) -> EnvironmentProcesses:
    config = EnvironmentProcessesConfig(count=1, python=python_of("environments"))
    return EnvironmentProcesses(name, arguments, config, (120.0, "start_s"))


async def test_a_family_of_reasoning_gym_scores_answers_and_holds_tasks_out() -> None:
    options = {"min_word_len": 3, "max_word_len": 4}
    async with processes("reasoning_gym", family="spell_backward", options=options) as words:
        train, held_out = await words.tasks("train", 0), await words.tasks("eval", 0)
        assert await words.tasks("eval", 1) == held_out
        assert not {each.data["question"] for each in train} & {each.data["question"] for each in held_out}
        task = train[5]
        system, question = await words.messages(task)
        assert "<answer>" in system["content"]
        word = question["content"].rsplit(" ", 1)[-1]
        right, wrong = f"It is <answer>{word[::-1]}</answer>.", "<answer>qqqqqqqq</answer>"
        scores = await words.score(task, [right, wrong, word[::-1]])
        assert scores[0] == 1
        assert None not in scores
        assert max(float(each or 0) for each in scores[1:]) < 0.2, "without the tag there is no answer"


async def test_a_family_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(Exception, match=r"no family 'nonsense'; it has .*leg_counting"):
        async with processes("reasoning_gym", family="nonsense"):
            pass


async def test_two_games_of_textarena_in_one_process_do_not_disturb_each_other() -> None:
    async with processes("textarena", game="GuessTheNumber-v0") as games:
        one, other = (await games.tasks("eval", 0))[:2]
        async with games.episode(one, 0) as first, games.episode(other, 0) as second:
            ends = []
            for episode in (first, second, first, second):
                opening = episode.messages[-1]["content"]
                assert "between 1 and 20" in opening
            for episode in (first, second):
                low, high = 1, 20
                while True:
                    guess = (low + high) // 2
                    turn = await episode.step(f"[{guess}]")
                    if turn.done:
                        break
                    assert re.search("higher|lower", turn.messages[-1]["content"])
                    low, high = (guess + 1, high) if "higher" in turn.messages[-1]["content"] else (low, guess - 1)
                ends.append((guess, turn.reward, turn.metrics))
            assert [reward for _, reward, _ in ends] == [1.0, 1.0]
            assert all(metrics["invalid_move"] == 0 for *_, metrics in ends)


async def test_a_game_that_is_opened_again_is_the_same_game() -> None:
    async with processes("textarena", game="Minesweeper-v0") as games:
        task = (await games.tasks("train", 3))[0]
        boards = []
        for _ in range(2):
            async with games.episode(task, 0) as game:
                turn = await game.step("[reveal 3 3]")
                boards.append((game.messages, turn.messages))
        assert boards[0] == boards[1]


async def test_a_game_for_two_is_refused() -> None:
    async with processes("textarena", game="TicTacToe-v0") as games:
        task = (await games.tasks("train", 0))[0]
        with pytest.raises(Exception, match="cannot begin TicTacToe-v0 with one player"):
            async with games.episode(task, 0):
                pass


MCP_SERVER = """
import os
try:
    from mcp.server import MCPServer as Server
except ImportError:  # 1.30
    from mcp.server.fastmcp import FastMCP as Server

from mcp.shared.exceptions import UrlElicitationRequiredError
try:
    from mcp.shared.exceptions import MCPError as Refused
except ImportError:  # 1.30 says what a tool raises as its result
    Refused = ValueError

server = Server("counter")
count = 0

@server.tool()
def add(amount: int) -> str:
    "Add to the counter."
    global count
    if amount == 13:
        raise ValueError("no thirteen")
    if amount == 99:
        os._exit(1)
    count += amount
    return str(count)

@server.tool()
def refuse(code: int) -> str:
    "Let the server refuse the call itself."
    if code == 0:
        raise UrlElicitationRequiredError([])
    raise Refused(code, "not so")

@server.tool()
def secret() -> str:
    "Not for the model."
    return "s"

server.run()
"""


@pytest.mark.parametrize("name", ["environments", "verifiers"])
@pytest.mark.parametrize("shared", [True, False])
async def test_tools_of_an_mcp_server_keep_their_state_where_it_belongs(
    tmp_path: Path, name: str, shared: bool
) -> None:
    (tmp_path / "server.py").write_text(MCP_SERVER)
    (tmp_path / "rows.jsonl").write_text('{"question": "Count to 5.", "answer": "5"}\n')
    arguments = {
        "server": f"{python_of(name)} {tmp_path}/server.py",
        "dataset": f"{tmp_path}/rows.jsonl",
        "tools": ["add", "refuse"],
        "shared": shared,
    }
    config = EnvironmentProcessesConfig(count=1, python=python_of(name))
    async with EnvironmentProcesses("mcp", arguments, config, (120.0, "start_s")) as tools:
        (task,) = await tools.tasks("train", 0)

        async def sent(episode, arguments: str, tool: str = "add") -> str:
            call = {"id": "1", "function": {"name": tool, "arguments": arguments}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
            return (await episode.step(message)).messages[0]["content"]

        async def said(episode, value: str, tool: str = "add", name: str = "amount") -> str:
            return await sent(episode, f'{{"{name}": {value}}}', tool)

        async with tools.episode(task, 0) as one, tools.episode(task, 1) as other:
            tool, _ = one.tools
            assert tool["function"]["name"] == "add"
            assert tool["function"]["parameters"]["properties"]["amount"]["type"] == "integer"
            assert await said(one, "2") == "2"
            assert await said(other, "3") == ("5" if shared else "3")
            assert (await said(one, "13")).startswith("error: ")
            assert await said(one, "1", "secret") == "error: there is no tool secret"
            assert (await said(one, "oops")).startswith("error: the arguments are not JSON")
            for code in ("0", "-32602", "-32603", "-32000"):
                assert (await said(one, code, "refuse", "code")).startswith("error: ")
            assert (await said(one, '"text"')).startswith("error: ")
            for text in ("5", "null", "[1, 2]", '"text"', "9" * 5000, "[" * 100_000, '{"amount": "\\ud800"}'):
                assert (await sent(one, text)).startswith("error: the arguments are not "), text
            assert (await sent(one, '{"amount": ' + "[" * 200 + "]" * 200 + "}")).startswith(
                "error: the arguments have more"
            )
            assert (await said(one, "NaN")).startswith("error: ")
            assert await said(other, "0") == ("5" if shared else "3"), "nobody else has noticed"
            end = await one.step({"role": "assistant", "content": " 5 "})
            assert (end.reward, end.done) == (1.0, True)
        async with tools.episode(task, 2) as dies:
            with pytest.raises(Exception, match="the MCP server failed in add"):
                await said(dies, "99")
        async with tools.episode(task, 3) as after:
            assert await said(after, "4") == "4", "another server took its place"


@pytest.mark.parametrize(
    ("server", "tools", "message"),
    [("no-such-command", [], "no-such-command cannot be used"), ("", ["take"], r"no tools \['take'\]")],
)
async def test_an_mcp_server_that_cannot_be_used_is_named(
    tmp_path: Path, server: str, tools: list[str], message: str
) -> None:
    (tmp_path / "server.py").write_text(MCP_SERVER)
    (tmp_path / "rows.jsonl").write_text('{"question": "?", "answer": "5"}\n')
    command = server or f"{python_of('environments')} {tmp_path}/server.py"
    async with processes("mcp", server=command, dataset=f"{tmp_path}/rows.jsonl", tools=tools) as environment:
        (task,) = await environment.tasks("train", 0)
        with pytest.raises(Exception, match=message):
            async with environment.episode(task, 0):
                pass


OPENENV_SERVER = """
import random, sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    message: str
    loud: bool = False

class Heard(Observation):
    text: str
    tries: int

class Cut(Heard):
    truncated: bool

class Left(Cut):
    terminated: bool = False

class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.tries = random.Random(seed).randint(1, 9), 0
        return Heard(text="Guess a number from 1 to 9.", tries=0)
    def step(self, action, timeout_s=None, **kwargs):
        assert action.loud
        self.tries += 1
        if action.message in ("cut", "leave"):  # a text that was cut; an environment of Gymnasium at its limit
            kind = Cut if action.message == "cut" else Left
            return kind(text="N", tries=self.tries, truncated=True)
        right, late = action.message.strip() == str(self.number), self.tries == 9
        metadata = {"truncated": late and not right}
        return Heard(text="No.", tries=self.tries, done=right or late, reward=1.0 / self.tries if right else None, metadata=metadata)
    @property
    def state(self):
        return State(episode_id="e", step_count=self.tries)

uvicorn.run(create_fastapi_app(Guess, Say, Heard, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
"""


async def test_the_environment_of_an_openenv_server_is_played_over_its_protocol(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(OPENENV_SERVER)
    (port,) = free_ports(1)
    config = EnvironmentProcessesConfig(count=1, python=python_of("openenv"))
    arguments = {"url": f"http://127.0.0.1:{port}", "fixed": {"loud": True}}
    argv = [python_of("openenv"), str(tmp_path / "server.py"), str(port)]
    with subprocess.Popen(argv) as server:  # noqa: ASYNC220 - it starts in milliseconds
        try:
            async with EnvironmentProcesses("openenv", arguments, config, (120.0, "start_s")) as guesses:
                tasks = await guesses.tasks("eval", 0)
                await reached(port)
                async with guesses.episode(tasks[0], 0) as one, guesses.episode(tasks[1], 0) as other:
                    assert one.messages == [{"role": "user", "content": "Guess a number from 1 to 9."}]
                    found = []
                    for episode in (one, other):
                        for guess in range(1, 10):
                            turn = await episode.step(str(guess))
                            if turn.done:
                                found.append(guess)
                                assert not turn.truncated
                                assert turn.reward == pytest.approx(1 / guess)
                                break
                            assert (turn.messages[0]["content"], turn.reward) == ("No.", None)
                async with guesses.episode(tasks[0], 5) as again:
                    assert (await again.step(str(found[0]))).done, "the task's seed decides"
                async with guesses.episode(tasks[0], 0) as wrong:
                    turns = [await wrong.step("none of them") for _ in range(9)]
                    assert [(each.done, each.truncated) for each in turns[-2:]] == [(False, False), (True, True)]
                async with guesses.episode(tasks[0], 0) as limited:
                    turns = [await limited.step(each) for each in ("cut", "leave")]
                    assert [(each.done, each.truncated) for each in turns] == [(False, False), (True, True)]
            whole = {**arguments, "action": "", "fixed": {}}
            async with EnvironmentProcesses("openenv", whole, config, (120.0, "start_s")) as guesses:
                async with guesses.episode(tasks[0], 0) as episode:
                    assert "This is no action" in (await episode.step("five")).messages[0]["content"]
                    assert (await episode.step('{"message": "%d", "loud": true}' % found[0])).done  # noqa: UP031
                async with guesses.episode(tasks[0], 0) as episode:
                    with pytest.raises(Exception, match="the OpenEnv server answered step with"):
                        await episode.step('{"volume": 3}')
        finally:
            server.terminate()


async def reached(port: int) -> None:
    """Wait until a server accepts connections."""
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    subprocess.run([*SLUICE, "init-model", str(directory / "model")], check=True, capture_output=True, timeout=120)
    return str(directory / "model")


@pytest.mark.parametrize(
    ("name", "environment"),
    [pytest.param("verifiers", "reverse-classic", marks=pytest.mark.soak), ("verifiers04", "reverse-taskset")],
)
def test_a_run_trains_on_an_environment_of_verifiers(model: str, tmp_path: Path, name: str, environment: str) -> None:
    settings = {
        "output-dir": str(tmp_path),
        "model": model,
        "orchestrator.environment-args": json.dumps({"id": environment}),
        "orchestrator.environment-processes.python": python_of(name),
        "orchestrator.max-steps": str(STEPS),
        "orchestrator.batch-size": str(TASKS),
        "orchestrator.group-size": str(ATTEMPTS),
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "examples/verifiers")}
    argv = [*SLUICE, "rl", "@", str(ROOT / "examples/verifiers/rl.toml"), *words]
    done = subprocess.run(argv, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "verifiers/report.json").read_text())
    assert report["steps"] == STEPS
    rows = [
        json.loads(line)
        for file in (tmp_path / "verifiers/trajectories").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert len(rows) >= STEPS * TASKS * ATTEMPTS * 3 // 4, "verifiers gives an episode up whose answer is empty"
    assert all(0 <= row["reward"] <= 1 for row in rows)
    audit = subprocess.run([*SLUICE, "audit", str(tmp_path / "verifiers")], capture_output=True, text=True, check=False)
    assert audit.returncode == 0, audit.stdout
