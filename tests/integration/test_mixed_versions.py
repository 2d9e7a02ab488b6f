"""Services of v0.1.0 and of this version stand beside each other in one run, as during an upgrade: nothing is lost, and the run goes on.

The run has episodes of its own, which the orchestrator samples at the replica, and those of an agent, which go through the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import uuid
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked_programs import ENVIRONMENT
from forked_run import ForkedRun
from held_ports import held_ports
from rank_programs import RankPrograms
from test_orchestrator_recovery import ENVIRONMENT as VOWELS

from sluice.agent import AgentClient, Episode
from sluice.cli.init_model import ModelShape, init_model
from sluice.cli.main import main
from sluice.client import OrchestratorClient
from sluice.rpc import ClientSecurity, SluiceError
from sluice.rpc.principals import Role, add_token
from sluice.supervise.restart_policy import EXIT_UNFINISHED
from sluice.v1 import tokens_pb2

# Their code is in the history, which a shallow clone lacks: `make test-soak`.
pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]

V0_1_0 = "b277858"
"""The commit that was released as v0.1.0."""

ROOT = Path(__file__).parents[2]

DEADLINE_S = 800
"""Real seconds for a whole run; only a broken one takes them."""

STEPS = 8

SECOND = "second"
"""A further replica."""

SETTINGS = """
run = "mixed"
model = "{directory}/model"
output_dir = "{directory}/out"
max_staleness = 2
[orchestrator]
batch_size = 4
group_size = 2
max_steps = {steps}
sampling = {{ max_tokens = 8 }}
checkpoint = {{ every_steps = 4 }}
[[orchestrator.environments]]
name = "own"
environment = "{directory}/vowels_env.py:Vowels"
[[orchestrator.environments]]
name = "agents"
environment = "{directory}/vowels_env.py:Vowels"
workflow = "external"
[trainer]
lr = 1e-3
[rollout]
engine = "transformers"
stage_dir = "{directory}"
"""


PRINCIPALS: dict[str, Role] = {
    "orchestrator": "admin",
    "trainer": "trainer",
    "rollout": "replica",
    "gateway": "gateway",
    "dispatcher": "dispatcher",
    "agent": "agent",
    "operator": "admin",
}

PROTECTED = """
[security]
principals_file = "{directory}/principals.toml"
dispatcher_token_file = "{directory}/dispatcher.token"
service_token_files = {{ {files} }}
"""


@pytest.fixture(scope="module")
def old_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of v0.1.0, as a folder for PYTHONPATH."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    packed = subprocess.run(["git", "archive", V0_1_0], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"needs the commit {V0_1_0} of v0.1.0: `git fetch --unshallow` ({packed.stderr.decode().strip()})")
    directory = tmp_path_factory.mktemp("v0.1.0")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
        files.extractall(directory, filter="data")
    describe(directory)
    return directory


def describe(directory: Path) -> None:
    """Write what an installation of a release says of it: its services would be those of this version otherwise."""
    project = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    described = directory / f"sluice-{project['version']}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sluice\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
    (described / "entry_points.txt").write_text("\n".join(lines))


class OldProcess:
    """A program of an earlier version; the calls are those of `Forked`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self.returncode is None:
            self._process.kill()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


class MixedRun(ForkedRun):
    """One run, of whose services some are of v0.1.0.

    Args:
        programs: Forks those of this version.
        directory: For all files.
        release: The files of v0.1.0.
        http_port: Of the gateway.
    """

    def __init__(self, programs: RankPrograms, directory: Path, release: Path, http_port: int) -> None:
        super().__init__(programs, directory, ["@", str(directory / "run.toml")])
        self._release, self.http_port = release, http_port
        self.addresses["gateway"] = f"unix:{directory}/gateway.sock"
        self.old: Collection[str] = ()
        self.run_dir = directory / "out" / "mixed"
        (directory / "vowels_env.py").write_text(VOWELS)
        shape = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=128)
        init_model(directory / "model", shape, seed=0)
        self.security = ClientSecurity()
        self._protected = ""
        self.write(STEPS)

    def write(self, steps: int) -> None:
        """Write the settings of a run of so many steps."""
        directory = self._directory
        text = SETTINGS.format(directory=directory, steps=steps) + self._protected
        (directory / "run.toml").write_text(text)

    def protect(self) -> None:
        """Let services and agents be principals."""
        file = self._directory / "principals.toml"
        for name, role in PRINCIPALS.items():
            (self._directory / f"{name}.token").write_text(add_token(file, name, role))
        files = ", ".join(f'{name} = "{self._directory}/{name}.token"' for name in self.addresses if name in PRINCIPALS)
        self._protected = PROTECTED.format(directory=self._directory, files=files)
        self.security = ClientSecurity(token_file=self._directory / "agent.token")

    @property
    def operator(self) -> OrchestratorClient:
        """A client of the orchestrator."""
        token = self._directory / "operator.token"
        security = ClientSecurity(token_file=token) if self._protected else ClientSecurity()
        return OrchestratorClient(self.addresses["orchestrator"], security)

    @property
    def headers(self) -> dict[str, str]:
        """What an agent sends over HTTP that is a principal."""
        file = self.security.token_file
        return {} if file is None else {"authorization": f"Bearer {file.read_text()}"}

    def _words(self, name: str) -> list[str]:
        words = super()._words("rollout" if name == SECOND else name)
        if SECOND in self.addresses:
            replicas = [self.addresses["rollout"], self.addresses[SECOND]]
            words = [word for word in words if not word.startswith(("--peers.rollout", f"--peers.{SECOND}"))]
            words.append(f"--peers.rollout={json.dumps(replicas)}")
        if name == SECOND:
            words = [word for word in words if not word.startswith("--server.host")]
            words += [f"--server.host={self.addresses[SECOND]}", "--replica=second"]
        if name == "gateway":
            words.append(f"--server.http-port={self.http_port}")
        if name == "orchestrator" and name not in self.old and "gateway" in self.old:
            words.append("--orchestrator.external.one-key=true")  # an old gateway tells HTTP clients of no other key
        return words

    async def start(self, name: str) -> None:
        if name not in self.old:
            await super().start(name)
            return
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SLUICE_")}
        environment = kept | ENVIRONMENT | {"PYTHONPATH": str(self._release)}
        with self._log(name).open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "sluice.cli.main", *self._words(name)),
                cwd=self._release,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes[name] = OldProcess(process)

    async def upgrade(self, name: str) -> None:
        """End a service of v0.1.0, and start this version of it."""
        self.processes[name].send_signal(signal.SIGTERM)
        assert await self.processes[name].wait() in {0, EXIT_UNFINISHED}, self.log(name)
        self.old = {*self.old} - {name}
        await self.start(name)

    async def samples(self, replica: str) -> None:
        """Wait until a replica has sampled for the run."""
        async with self.operator as client:
            while True:
                found = (await client.run("mixed")).replicas
                if any(each.replica == replica and each.running for each in found):
                    return
                assert self.processes[replica].returncode is None, self.log(replica)
                await asyncio.sleep(0.01)

    async def goes_on(self, steps: int = 3) -> None:
        """Wait until so many further steps are applied."""
        least = 0
        while True:
            with contextlib.suppress(SluiceError):
                async with self.operator as client:
                    step = (await client.run("mixed")).step
                    least = least or step + steps
                    if step >= least:
                        return
            for name, process in self.processes.items():
                assert process.returncode is None, f"{name}: {self.log(name)}"
            await asyncio.sleep(0.1)

    @property
    def url(self) -> str:
        """Where the gateway serves HTTP."""
        return f"http://127.0.0.1:{self.http_port}"

    async def answers(self) -> None:
        """Wait until the gateway serves HTTP."""
        async with httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get("/health")).status_code == 200:
                        return
                assert self.processes["gateway"].returncode is None, self.log("gateway")
                await asyncio.sleep(0.1)


@pytest.fixture
async def run(tmp_path: Path, old_release: Path, rank_programs: RankPrograms) -> AsyncIterator[MixedRun]:
    with held_ports(1) as (port,):
        found = MixedRun(rank_programs, tmp_path, old_release, port)
        try:
            yield found
        finally:
            await found.stop()


class Agent:
    """Plays episodes over gRPC and over HTTP, with and without a stream.

    Attributes:
        played: Episodes to their end.
        failures: What went wrong, unless the run had ended.
    """

    def __init__(self) -> None:
        self.played = 0
        self.failures: list[str] = []
        self._begun = itertools.count()

    async def play(self, episode: Episode) -> float | None:
        try:
            reward = await self._play(episode)
        except (SluiceError, httpx.HTTPStatusError) as error:
            self._note(error)
            raise
        self.played += 1
        return reward

    async def _play(self, episode: Episode) -> float | None:
        number = next(self._begun)
        messages = [*episode.opening.messages]
        first = await episode.generate(messages)
        said = [{"role": each.role, "content": each.content} for each in (*messages, first.message)]
        said.append({"role": "user", "content": "again"})
        headers = {"authorization": f"Bearer {episode.opened.session_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=DEADLINE_S) as http:
            await chat(http, episode.opened.openai_base_url, said, stream=bool(number % 2))
        # A fork: another message after the first turn.
        await episode.generate([*messages, first.message, tokens_pb2.ChatMessage(role="user", content="stop")])
        return share_of_vowels(first.message.content) if number % 3 else None

    async def play_over_http(self, gateway: str, principal: dict[str, str]) -> None:
        """Play episodes until the run has ended."""
        async with httpx.AsyncClient(base_url=gateway, headers=principal, timeout=DEADLINE_S) as http:
            while True:
                answer = await post(http, "/rl/sessions", {"wait_s": 5, "request_id": uuid.uuid4().hex})
                if answer.status_code == 429:  # nothing is on offer
                    continue
                if "RUN_ENDED" in answer.text:
                    return
                try:
                    await self._play_over_http(http, answer.raise_for_status().json())
                except httpx.HTTPStatusError as error:
                    self._note(error)
                else:
                    self.played += 1

    async def _play_over_http(self, http: httpx.AsyncClient, session: dict[str, Any]) -> None:
        samples = {"authorization": f"Bearer {session['key']}"}
        settles = {"authorization": f"Bearer {session.get('settling_key') or session['key']}"}
        if "authorization" in http.headers:  # it is a principal
            settles = {}
        said = [{"role": "user", "content": "a word"}]
        async with httpx.AsyncClient(headers=samples, timeout=DEADLINE_S) as sampling:
            text = await chat(sampling, session["openai_base_url"], said, stream=False)
        for verb, body in (("renew", {}), ("reward", {"reward": share_of_vowels(text)}), ("end", {})):
            (await post(http, f"/rl/sessions/{session['id']}/{verb}", body, settles)).raise_for_status()

    def _note(self, error: SluiceError | httpx.HTTPStatusError) -> None:
        text = error.response.text if isinstance(error, httpx.HTTPStatusError) else str(error)
        if not any(reason in text for reason in ("RUN_ENDED", "SESSION_ENDED")):
            self.failures.append(text)


async def post(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    """Send a request, as clients do again while no gateway answers."""
    headers = {**(headers or {}), "x-stainless-retry-count": "0"}
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = await http.post(path, json=body, headers=headers)
            if answer.status_code != 503:
                return answer
        headers["x-stainless-retry-count"] = str(int(headers["x-stainless-retry-count"]) + 1)
        await asyncio.sleep(0.1)


async def chat(http: httpx.AsyncClient, base_url: str, messages: list[dict[str, str]], *, stream: bool) -> str:
    """Return what a model says, which a stream says in parts."""
    body = {"model": "any", "messages": messages, "stream": stream}
    answer = (await post(http, f"{base_url}/chat/completions", body)).raise_for_status()
    if not stream:
        return answer.json()["choices"][0]["message"]["content"] or ""
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"], "the stream has its end"
    return "".join(each["delta"].get("content") or "" for each in choices)


def share_of_vowels(text: str) -> float:
    return sum(each in "aeiou" for each in text) / max(1, len(text))


@contextlib.asynccontextmanager
async def playing(run: MixedRun) -> AsyncIterator[Agent]:
    """Have agents play as long as the block lasts, and end it if one fails."""
    agent = Agent()
    await run.answers()
    async with AgentClient(run.addresses["gateway"], "mixed", run.security, patience_s=DEADLINE_S) as client:
        grpc = asyncio.create_task(client.run(agent.play, at_a_time=2))
        http = asyncio.create_task(agent.play_over_http(run.url, run.headers))
        try:
            yield agent
        finally:
            for each in (grpc, http):
                each.cancel()
            outcomes = await asyncio.gather(grpc, http, return_exceptions=True)
    agent.failures += [repr(each) for each in outcomes if isinstance(each, Exception)]


def audited(run: MixedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    monkeypatch.chdir(run.run_dir.parents[1])
    capsys.readouterr()
    assert main(["audit", str(run.run_dir), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    "old", [("gateway", "rollout"), ("weightsync", "trainer", "orchestrator")], ids=["old samplers", "new samplers"]
)
async def test_services_of_two_versions_share_a_run(
    run: MixedRun, old: Collection[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.old = {*old}
    async with asyncio.timeout(DEADLINE_S):
        for name in run.addresses:
            await run.start(name)
        async with playing(run) as agent:
            code = await run.processes["orchestrator"].wait()
    assert code == 0, "\n".join(run.log(name) for name in run.addresses)
    report = json.loads((run.run_dir / "report.json").read_text())
    assert (report["state"], report["steps"]) == ("succeeded", STEPS)
    assert [step for step, _ in report["reward_curve"]] == list(range(1, STEPS + 1)), "none is left out"
    found = audited(run, monkeypatch, capsys)
    assert found["differences"] == []
    assert found["trained"] == report["trajectories_trained"] > 0
    assert agent.failures == []
    assert agent.played > STEPS


@pytest.mark.parametrize("principals", [False, True], ids=["anyone", "principals"])
async def test_a_run_is_upgraded_service_by_service(
    run: MixedRun, principals: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of docs/upgrades.md, while agents play."""
    run.old = {*run.addresses}
    if principals:
        run.protect()
    run.write(100_000)
    old = [*run.addresses]
    run.addresses[SECOND] = f"unix:{run.run_dir.parents[1]}/second.sock"
    async with asyncio.timeout(DEADLINE_S):
        for name in old:
            await run.start(name)
        async with playing(run) as agent:
            await run.goes_on()
            await run.start(SECOND)
            await run.samples(SECOND)
            await run.kill("rollout")  # what it samples goes on at the other one
            del run.processes["rollout"]
            await run.goes_on()
            run.old = {*run.old} - {"rollout"}
            await run.start("rollout")
            for name in ("gateway", "weightsync", "orchestrator", "trainer"):
                await run.goes_on()
                await run.upgrade(name)
            await run.goes_on()
            async with run.operator as client:
                await client.stop("mixed")
            code = await run.processes["orchestrator"].wait()
    assert code == 0, "\n".join(run.log(name) for name in run.addresses)
    report = json.loads((run.run_dir / "report.json").read_text())
    found = audited(run, monkeypatch, capsys)
    assert report["state"] == "stopped"
    assert found["differences"] == []
    assert found["trained"] >= 18, "three steps before each upgrade, and after the last"
    assert agent.failures == []
