"""`sluice rl` with the real services, sampled by transformers: deaths, Ctrl-C, resume and refusals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from supervised import LIMIT_S, wait_for

from sluice.cli import fork_server
from sluice.cli.init_model import ModelShape, init_model
from sluice.client import OrchestratorClient
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.rpc.principals import add_token
from sluice.v1 import common_pb2, common_pb2_grpc, orchestrator_pb2, trainer_pb2, weightsync_pb2

ROOT = Path(__file__).parents[2]
SLUICE = (sys.executable, "-m", "sluice.cli.main")

AGENT = """
import openai

class Agent:
    def __init__(self, worth):
        self.worth = worth
        self.client = openai.AsyncOpenAI(api_key="each episode has its own")

    async def run(self, data, base_url, api_key):
        policy = self.client.with_options(base_url=base_url, api_key=api_key)
        asked = [{"role": "user", "content": data["text"]}]
        reply = await policy.chat.completions.create(model="any", messages=asked)
        return self.worth if len(reply.choices[0].message.content) % 2 else self.worth / 2
"""

TAKES_PORTS = """
# `sluice` beside a program that takes the ports which were found free, the first time.
import socket, sys
from sluice.cli.main import main
from sluice.plan import local

found, taken = local.free_ports, []

def free_ports(count):
    ports = found(count)
    if not taken:
        taken.extend(socket.create_server((local.LOOPBACK, port)) for port in ports)
    return ports

local.free_ports = free_ports
sys.exit(main(sys.argv[1:]))
"""

WITHOUT_END = "100000"
"""Steps of a run that the test ends, whatever has happened by then."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "model"
    init_model(directory, ModelShape(layers=1))
    return directory


class Run:
    """A run under way."""

    def __init__(
        self, model: Path, output_dir: Path, *flags: str, name: str = "small", program: tuple[str, ...] = SLUICE
    ) -> None:
        settings = ("@", "examples/reverse_text/rl.toml", "--model", str(model), "--output-dir", str(output_dir))
        small = ("--rollout.engine", "transformers", "--orchestrator.batch-size", "2", "--orchestrator.group-size", "2")
        argv = [*program, "rl", *settings, "--run", name, *small, *flags]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            argv, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=os.environ
        )
        self.directory = output_dir / name
        self.seen: list[str] = []

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(line.rstrip())
            yield self.seen[-1]

    def until(self, beginning: str) -> str:
        for line in self.lines():
            if line.startswith(beginning):
                return line
        raise AssertionError(f"no line begins with {beginning!r}:\n" + "\n".join(self.seen))

    def end(self) -> int:
        list(self.lines())
        return self.process.wait(timeout=LIMIT_S)

    def stop(self, security: SecurityConfig | None = None) -> None:
        """End the run after the batches that are made."""
        target = tomllib.loads((self.directory / "config.toml").read_text())["peers"]["orchestrator"]

        async def call() -> None:
            async with OrchestratorClient(target, security or SecurityConfig()) as orchestrator:
                await orchestrator.stop(self.directory.name, "seen enough")

        asyncio.run(call())

    def report(self) -> dict[str, Any]:
        written: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return written

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted((self.directory / "logs").iterdir()))

    def child(self, service: str) -> psutil.Process:
        """Return a service: on Linux the child of its fork server, which has the same arguments."""
        found = next(each for each in psutil.Process(self.process.pid).children() if service in each.cmdline())
        return found.children()[0] if fork_server.__name__ in found.cmdline() else found


@pytest.fixture
def started(model: Path, tmp_path: Path) -> Iterator:
    runs: list[Run] = []

    def start(*flags: str, **options: Any) -> Run:
        runs.append(Run(model, tmp_path, *flags, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.process.terminate()
        run.process.communicate(timeout=LIMIT_S)


def served_runs(run: Run) -> dict[str, str]:
    """The run that each service which belongs to one names in GetServerInfo."""
    peers = tomllib.loads((run.directory / "config.toml").read_text())["peers"]
    runs = {}
    for target in (peers["orchestrator"], peers["trainer"], *peers["rollout"]):
        with grpc.insecure_channel(target) as channel:
            stub = common_pb2_grpc.ServerInfoServiceStub(channel)
            info = stub.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=LIMIT_S, wait_for_ready=True)
        runs[info.service] = info.run
    return runs


def test_each_service_may_be_killed_once_and_the_run_still_finishes(started, tmp_path: Path) -> None:
    run = started("--orchestrator.max-steps", WITHOUT_END, "--orchestrator.checkpoint.every-steps", "1")
    run.until("step 2/")
    for service in ("rollout", "weightsync", "trainer", "orchestrator"):
        run.child(service).kill()
        assert run.until(service).startswith(f"{service} ended with signal SIGKILL; restart 1 of 3")
        run.until(f"{service} serves")
        run.until("step ")
    assert audit(run.directory)["exact"], "also while it runs"
    run.stop()
    assert run.end() == 0, "\n".join(run.seen)
    report = run.report()
    steps = report["steps"]
    told = audit(run.directory)
    assert told["exact"], told["differences"]
    assert told["batches"] == steps
    assert told["accepted"] == told["trained"] + sum(told["dropped"].values()) + told["in_flight"]

    *_, older, _ = sorted(
        (path.name for path in run.directory.glob("checkpoints/step_*")), key=lambda name: int(name[5:])
    )
    (tmp_path / "agent.py").write_text(AGENT)
    agents = ("--agents.agent", f"{tmp_path}/agent.py:Agent", "--agents.args.worth", "0.5")
    ports = ("--gateway.server.port", "0", "--gateway.server.http-port", "0")
    flags = (*agents, *ports, "--orchestrator.max-steps", WITHOUT_END)
    fork = started(*flags, "--resume-from", f"small/{older}", name="fork")
    fork.until(f"step {steps + 2}/")
    fork.child("agents").terminate()
    assert fork.until("agents ended").startswith("agents ended with exit code 143; restart 1 of 3"), "it drained"
    fork.until("agents serves")
    fork.until("step ")
    fork.stop()
    assert fork.end() == 0, "\n".join(fork.seen)
    assert fork.seen[0].startswith(f"{fork.directory}: forked from small/{older}@")
    told = audit(fork.directory)
    assert told["exact"], told["differences"]
    assert (told["batches"], int(told["version"].partition(".")[0])) == (fork.report()["steps"], report["epochs"] + 1)
    last = max(fork.directory.glob("trajectories/step_*.jsonl"), key=lambda path: int(path.stem[5:]))
    rewards = {json.loads(row)["reward"] for row in last.read_text().splitlines()}
    assert rewards <= {0.25, 0.5}, "what the agent gave"
    assert audit(run.directory)["batches"] == steps, "the old run is as it was"


def audit(directory: Path) -> dict[str, Any]:
    command = [*SLUICE, "audit", str(directory), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if told["exact"] else 1)
    return told


def test_when_a_service_is_dead_for_good_the_run_says_which_and_why_and_leaves_nothing(started) -> None:
    run = started("--orchestrator.max-steps", WITHOUT_END, "--max-restarts", "0", "--allocation-mode", "d1+d2")
    run.until("step 1/")
    others = psutil.Process(run.process.pid).children(recursive=True)
    run.child("trainer").kill()
    assert run.end() == 1
    said = "\n".join(run.seen)
    assert "run small failed after" in said
    assert "trainer ended with signal SIGKILL" in said
    assert "trainer | model loaded" in said
    assert "full log:" in said
    _, alive = psutil.wait_procs(others, timeout=LIMIT_S)
    assert not alive


def test_a_run_whose_ports_are_taken_before_its_services_listen_runs_on_others(started) -> None:
    run = started("--orchestrator.max-steps", "2", program=(sys.executable, "-c", TAKES_PORTS))
    assert run.end() == 0, "\n".join(run.seen)
    assert sum("cannot listen: another program took its port" in line for line in run.seen) == 1
    assert run.report()["steps"] == 2


def test_ctrl_c_stops_everything_and_the_run_is_resumed_ends_by_itself_and_is_not_begun_again(started) -> None:
    flags = ("--replicas", "2", "--orchestrator.checkpoint.every-steps", "1")
    run = started("--orchestrator.max-steps", WITHOUT_END, *flags)
    run.until("step 3/")
    if "rollout-0 serves" not in run.seen:  # the other replica may be first
        run.until("rollout-0 serves")
    assert served_runs(run) == {"orchestrator": "runs/small", "trainer": "runs/small", "rollout": "runs/small"}
    settings = tomllib.loads((run.directory / "config.toml").read_text())
    assert len(settings["peers"]["rollout"]) == 2
    drain = (*SLUICE, "drain", settings["peers"]["rollout"][0], "--grace", "0s")
    drained = subprocess.run(drain, cwd=ROOT, text=True, capture_output=True, check=False)
    assert drained.returncode == 0, drained.stderr
    assert run.until("rollout-0 ") == "rollout-0 was drained and is not started again"
    run.until("step ")
    children = psutil.Process(run.process.pid).children(recursive=True)
    run.process.send_signal(signal.SIGINT)
    list(run.lines())
    assert run.process.wait(timeout=LIMIT_S) == 130
    assert "--resume continues from step_" in run.seen[-1]
    assert not psutil.wait_procs(children, timeout=LIMIT_S)[1]
    assert "never retrieved" not in "\n".join(run.seen) + run.logs()
    last = [line for line in run.seen if line.startswith("step ")][-1]
    steps = int(last.removeprefix("step ").partition("/")[0]) + 20
    resumed = started("--orchestrator.max-steps", str(steps), *flags, "--resume")
    assert resumed.end() == 0, "\n".join(resumed.seen)
    assert resumed.seen[0].startswith("resuming from step_")
    assert "rollout-0 serves" in resumed.seen, "a new run has all replicas"
    assert resumed.seen[-1].startswith(f"run small done: {steps} steps")
    assert run.report()["steps"] == steps
    logs = {path.name for path in (run.directory / "logs").iterdir()}
    assert logs == {"rollout-0.log", "rollout-1.log", "trainer.log", "orchestrator.log", "weightsync.log"}
    assert all({"event", "timestamp"} <= json.loads(line).keys() for line in run.logs().splitlines())

    again = started("--orchestrator.max-steps", "3")
    assert again.end() == 2
    assert "continue it with --resume" in again.seen[-1]


def test_a_wrong_setting_of_one_service_is_reported_before_anything_starts(started) -> None:
    run = started("--trainer.lr", "fast")
    assert run.end() == 2
    assert "trainer.lr" in run.seen[-1]
    assert not run.directory.exists()


async def refusals(peers: dict[str, str], security: SecurityConfig) -> set[str]:
    """What the services answer to every call of the contracts of trainer, weight service and orchestrator."""
    found = set()
    for peer, contract in (
        ("trainer", trainer_pb2.DESCRIPTOR),
        ("weightsync", weightsync_pb2.DESCRIPTOR),
        ("orchestrator", orchestrator_pb2.DESCRIPTOR),
    ):
        async with connect(peers[peer], security) as channel:
            for method in (each for service in contract.services_by_name.values() for each in service.methods):
                make = getattr(
                    channel,
                    f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}",
                )
                call = make(f"/{method.containing_service.full_name}/{method.name}")
                answer = call(*(() if method.client_streaming else (b"",)), timeout=LIMIT_S)
                try:
                    await (answer.read() if method.server_streaming else answer)
                    found.add(f"{method.full_name} was served")
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNIMPLEMENTED:  # another server has this contract
                        found.add(SluiceError.from_rpc(error).reason)
    return found


def written_calls(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted((directory / "calls").iterdir())
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def refused_to_dispatcher(directory: Path) -> list[dict[str, Any]]:
    calls = written_calls(directory)
    return [each for each in calls if each["principal"] == "dispatcher" and each["code"] == "PERMISSION_DENIED"]


def test_each_service_is_a_principal_of_its_own_with_the_least_role_and_the_operator_changes_the_run(
    started, tmp_path: Path
) -> None:
    file = tmp_path / "principals.toml"
    roles = {"orchestrator": "admin", "trainer": "trainer", "rollout": "replica", "operator": "admin", "other": "agent"}
    for name, role in roles.items():
        (tmp_path / name).write_text(add_token(file, name, role))
    tokens = {name: str(tmp_path / name) for name in ("orchestrator", "trainer", "rollout")}
    run = started(
        *("--orchestrator.max-steps", WITHOUT_END, "--orchestrator.checkpoint.every-steps", "20"),
        *("--orchestrator.evaluation.every-steps", "2", "--orchestrator.evaluation.prompts", "2"),
        *("--security.principals-file", str(file), "--security.token-file", str(tmp_path / "operator")),
        *("--security.service-token-files", json.dumps(tokens)),
    )
    run.until("step 2/")
    change = (*SLUICE, "set", "small", "trainer.lr=1.5e-9", "--output-dir", str(tmp_path))
    changed = subprocess.run(change, cwd=ROOT, text=True, capture_output=True, check=False)
    assert changed.stdout.startswith("trainer.lr: "), changed.stderr
    refused = subprocess.run(
        [*change, "--security.token-file", str(tmp_path / "other")],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "ROLE_REQUIRED" in refused.stderr
    peers = tomllib.loads((run.directory / "config.toml").read_text())["peers"]
    settings = next(word for word in run.child("orchestrator").cmdline() if word.endswith("settings.toml"))
    private = tomllib.loads(Path(settings).read_text())["security"]["dispatcher_token_file"]
    assert Path(private).stat().st_mode & 0o077 == 0
    assert asyncio.run(refusals(peers, SecurityConfig(token_file=private))) == {"ROLE_REQUIRED"}
    wait_for(lambda: "OrchestratorService/StopRun" in {each["method"] for each in refused_to_dispatcher(run.directory)})
    run.child("orchestrator").kill()
    run.until("orchestrator serves")
    run.until("step ")
    run.stop(SecurityConfig(token_file=tmp_path / "operator"))
    assert run.end() == 0, "\n".join(run.seen)
    report = run.report()
    assert report["stop_reason"] == "seen enough"
    (setting,) = report["changed_settings"]
    assert (setting["principal"], setting["key"], setting["new"]) == ("operator", "trainer.lr", "1.5e-09")
    steps = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    rates = {step["step"]: step["trainer/learning_rate"] for step in steps if "trainer/learning_rate" in step}
    later = {number: rate for number, rate in rates.items() if number >= setting["from_batch"]}
    assert set(later.values()) == {1.5e-9}
    assert 1.5e-9 not in {rate for number, rate in rates.items() if number not in later}
    calls = [each for each in written_calls(run.directory) if each not in refused_to_dispatcher(run.directory)]
    assert {(each["principal"], each["method"]) for each in calls} == {
        ("orchestrator", "TrainerService/BeginEpoch"),
        ("orchestrator", "TrainerService/SaveCheckpoint"),
        ("orchestrator", "TrainerService/SubmitBatch"),
        ("dispatcher", "RolloutAdminService/SetWeightPolicy"),
        ("trainer", "WeightSyncService/CommitVersion"),
        ("operator", "OrchestratorService/SetRun"),
        ("operator", "OrchestratorService/StopRun"),
        ("other", "OrchestratorService/SetRun"),
    }
    assert {each["code"] for each in calls if each["principal"] != "other"} <= {"OK", "CANCELLED"}
    assert [each["code"] for each in calls if each["principal"] == "other"] == ["PERMISSION_DENIED"]
    assert not any((tmp_path / name).read_text() in run.logs() for name in roles)
