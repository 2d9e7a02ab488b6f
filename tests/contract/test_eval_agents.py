"""`sluice eval` with external agents: the real gateway and the agents' own processes, a scripted replica."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import sys

import pytest
from orchestrator_doubles import RolloutDouble, serve_rollout
from test_external_episodes import BARE

from orchestrator_svc.commands.eval.command import COMMAND
from orchestrator_svc.commands.eval.config import EvalConfig
from orchestrator_svc.commands.eval.play import _GATEWAY_PORTS, run_evaluation
from sluice.config import ConfigError
from sluice.versions import Version

pytestmark = pytest.mark.slow

LIMIT_S = 280.0

AGENT = '''
"""Plays one episode over HTTP, and ends; one task is too hard for it."""
import json, os, sys, urllib.request

def post(path, body, key=""):
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(os.environ["SLUICE_GATEWAY_URL"] + path, json.dumps(body).encode(), headers)
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        print(path, error.code, error.read().decode())
        sys.exit(error.code != 429)

session = post("/rl/sessions", {"wait_s": 30})
assert session["evaluation"], session
level = int(session["task"]["data"]["level"])
end = f"/rl/sessions/{session['id']}/end"
if level == 2:
    post(end, {"abandon": "too hard"}, session["settling_key"])
else:
    said = [{"role": "user", "content": "?"}]
    for turn in range(2):
        reply = post("/v1/chat/completions", {"model": "any", "messages": said}, session["key"])
        said += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
    post(end, {"reward": level}, session["settling_key"])
'''

CLASS = """
class Agent:
    async def arun_episode(self, engine, task):
        level = task["level"]
        if level == 2:
            raise ValueError("too hard")
        said = [{"role": "user", "content": "?"}]
        for turn in range(2):
            reply = await engine.generate(said)
            said += [reply.message, {"role": "user", "content": "go on"}]
        return level
"""


@pytest.fixture
async def argv(tmp_path):
    """Settings of an evaluation of a running server, with everything but the agent."""
    (tmp_path / "bare.py").write_text(BARE)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "class.py").write_text(CLASS)
    async with serve_rollout(RolloutDouble(version=Version(1, 7))) as address:
        yield ["--address", address, "--environment", f"{tmp_path}/bare.py:Bare", "--prompts", "3", "--samples", "2"]


@pytest.mark.parametrize("agent", ["agent.py", "-m sluice.cli.main agents --agent class.py:Agent"])
async def test_agents_play_held_out_tasks_and_what_they_fail_is_counted(argv, tmp_path, capsys, agent) -> None:
    output = tmp_path / "eval.json"
    command = f"cd {tmp_path} && {sys.executable} {agent}"
    argv += ["--agent", command, "--agents", "2", "--output", str(output)]
    assert await asyncio.to_thread(COMMAND.run, argv) == 1, "an episode failed"
    result = json.loads(output.read_text())
    metrics = result["metrics"]
    assert (result["policy_version"], result["episodes"]) == ("1.7", 6)
    assert (metrics["reward_mean"], metrics["greedy_reward_mean"]) == (0.5, 0.5)
    assert metrics["failed_episodes"] == 3, "two samples of the hard task, and a greedy one"
    assert result["tokens"] == 6 * 2 * 2, "six episodes of two turns of two tokens"
    assert "reward, sampled    0.5000  95% -0.4800 to 1.4800" in capsys.readouterr().out


async def test_a_gateway_whose_usual_ports_are_taken_takes_others_and_says_which(argv, tmp_path, capsys) -> None:
    config = EvalConfig(address=argv[1], environment=argv[3], workflow="external", prompts=1, samples=1, greedy=False)
    said = ""
    with contextlib.ExitStack() as taken:
        for port in _GATEWAY_PORTS:
            with contextlib.suppress(OSError):  # another program has it already
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
        evaluating = asyncio.create_task(run_evaluation(config))
        async with asyncio.timeout(LIMIT_S):
            while not evaluating.done() and not said.endswith("\n"):
                said += capsys.readouterr().err
                await asyncio.sleep(0.05)
        found = re.search(r"agents may connect: gRPC (\S+), HTTP (\S+), run", said)
        assert found, said or await evaluating
        ports = {int(address.rpartition(":")[2]) for address in found.groups()}
        assert len(ports) == 2
        assert not ports & set(_GATEWAY_PORTS)
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, str(tmp_path / "agent.py")), env={**os.environ, "SLUICE_GATEWAY_URL": found[2]}
        )
        outcome = await asyncio.wait_for(evaluating, LIMIT_S)
        assert await agent.wait() == 0
    assert outcome.tasks == 1
    assert [sample.reward for sample in outcome.result.samples] == [0.0]


@pytest.mark.parametrize(
    ("command", "problem"),
    [("echo out of luck; exit 3", r"exit code 3.*\nout of luck"), ("echo bye", r"(?s)bye.*began no episode")],
)
async def test_agents_that_die_end_the_evaluation_with_their_last_lines(argv, command, problem) -> None:
    config = EvalConfig(address=argv[1], environment=argv[3], agent=command)
    with pytest.raises(ConfigError, match=problem):
        await run_evaluation(config)
