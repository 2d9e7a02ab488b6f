"""`sluice rl` with the real services, sampled by transformers: deaths, Ctrl-C, resume and refusals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import psutil
import pytest
from supervised import LIMIT_S, wait_for

from sluice.cli import fork_server
from sluice.cli.init_model import ModelShape, init_model
from sluice.cli.main import main
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


class Ended(NamedTuple):
    """What a command of this process returned, and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def sluice(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs a command that starts no other process in this one."""

    def call(*words: str) -> Ended:
        capsys.readouterr()
        code = main(words)
        return Ended(code, *capsys.readouterr())

    return call


def words_of(model: Path, output_dir: Path, name: str, *flags: str) -> tuple[str, ...]:
    settings = (
        "@",
        str(ROOT / "examples/reverse_text/rl.toml"),
        "--model",
        str(model),
        "--output-dir",
        str(output_dir),
    )
    small = ("--rollout.engine", "transformers", "--orchestrator.batch-size", "2", "--orchestrator.group-size", "2")
    return ("rl", *settings, "--run", name, *small, *flags)


class Run:
    """A run under way."""

    def __init__(
        self, model: Path, output_dir: Path, *flags: str, name: str = "small", program: tuple[str, ...] = SLUICE
    ) -> None:
        self.words = words_of(model, output_dir, name, *flags)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*program, *self.words], cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=os.environ
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


def test_a_run_on_other_ports_is_stopped_by_ctrl_c_resumed_says_why_it_dies_for_good_and_is_not_begun_again(
    started, sluice
) -> None:
    """Its ports are taken before its services listen; resumed, its trainer has two ranks and may not be started again."""
    flags = ("--orchestrator.max-steps", WITHOUT_END, "--orchestrator.checkpoint.every-steps", "1")
    run = started(*flags, "--replicas", "2", program=(sys.executable, "-c", TAKES_PORTS))
    run.until("step 3/")
    if "rollout-0 serves" not in run.seen:  # the other replica may be first
        run.until("rollout-0 serves")
    assert sum("cannot listen: another program took its port" in line for line in run.seen) == 1
    assert served_runs(run) == {"orchestrator": "runs/small", "trainer": "runs/small", "rollout": "runs/small"}
    settings = tomllib.loads((run.directory / "config.toml").read_text())
    assert len(settings["peers"]["rollout"]) == 2
    drained = sluice("drain", settings["peers"]["rollout"][0], "--grace", "0s")
    assert drained.code == 0, drained.err
    assert run.until("rollout-0 was") == "rollout-0 was drained and is not started again"
    run.until("step ")
    children = psutil.Process(run.process.pid).children(recursive=True)
    run.process.send_signal(signal.SIGINT)
    list(run.lines())
    assert run.process.wait(timeout=LIMIT_S) == 130
    assert "--resume continues from step_" in run.seen[-1]
    assert not psutil.wait_procs(children, timeout=LIMIT_S)[1]
    assert "never retrieved" not in "\n".join(run.seen) + run.logs()

    resumed = started(*flags, "--allocation-mode", "d2+d2", "--max-restarts", "0", "--resume")
    resumed.until("step ")
    assert resumed.seen[0].startswith("resuming from step_")
    if "rollout-0 serves" not in resumed.seen:
        resumed.until("rollout-0 serves")  # a new run has all replicas
    others = psutil.Process(resumed.process.pid).children(recursive=True)
    resumed.child("trainer").kill()
    assert resumed.end() == 1
    said = "\n".join(resumed.seen)
    assert "run small failed after" in said
    assert "trainer ended with signal SIGKILL" in said
    assert "trainer | step" in said
    assert "full log:" in said
    _, alive = psutil.wait_procs(others, timeout=LIMIT_S)
    assert not alive
    logs = {path.name for path in (run.directory / "logs").iterdir()}
    assert logs == {"rollout-0.log", "rollout-1.log", "trainer.log", "orchestrator.log", "weightsync.log"}
    assert all({"event", "timestamp"} <= json.loads(line).keys() for line in run.logs().splitlines())

    again = sluice(*run.words)
    assert again.code == 2
    assert "continue it with --resume" in again.err


def test_a_wrong_setting_of_one_service_is_reported_before_anything_starts(model: Path, tmp_path: Path, sluice) -> None:
    refused = sluice(*words_of(model, tmp_path, "small", "--trainer.lr", "fast"))
    assert refused.code == 2
    assert "trainer.lr" in refused.err
    assert not (tmp_path / "small").exists()


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


def own_calls(run: Run) -> list[dict[str, Any]]:
    """The calls without those that this file makes as the dispatcher, which are refused."""
    return [each for each in written_calls(run.directory) if each not in refused_to_dispatcher(run.directory)]


def codes(run: Run, *principals: str) -> list[str]:
    return [each["code"] for each in own_calls(run) if each["principal"] in principals]


def assert_changed_by_the_operator(run: Run) -> None:
    (setting,) = run.report()["changed_settings"]
    assert (setting["principal"], setting["key"], setting["new"]) == ("operator", "trainer.lr", "1.5e-09")
    steps = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    rates = {step["step"]: step["trainer/learning_rate"] for step in steps if "trainer/learning_rate" in step}
    later = {number: rate for number, rate in rates.items() if number >= setting["from_batch"]}
    assert set(later.values()) == {1.5e-9}
    assert 1.5e-9 not in {rate for number, rate in rates.items() if number not in later}


def assert_written_calls(run: Run) -> None:
    assert {(each["principal"], each["method"]) for each in own_calls(run)} == {
        ("orchestrator", "TrainerService/BeginEpoch"),
        ("orchestrator", "TrainerService/SaveCheckpoint"),
        ("orchestrator", "TrainerService/SubmitBatch"),
        ("dispatcher", "RolloutAdminService/SetWeightPolicy"),
        ("trainer", "WeightSyncService/CommitVersion"),
        ("operator", "OrchestratorService/SetRun"),
        ("operator", "OrchestratorService/StopRun"),
        ("other", "OrchestratorService/SetRun"),
    }
    assert codes(run, "other") == ["PERMISSION_DENIED"]
    assert set(codes(run, "operator")) == {"OK"}
    assert {"PERMISSION_DENIED", "UNAUTHENTICATED"}.isdisjoint(codes(run, "orchestrator", "trainer"))


def fork_and_play(run: Run, started, sluice: Callable[..., Ended], tmp_path: Path) -> None:
    """Fork a run that has ended, and let agents of a program play it, which are stopped once."""
    report = run.report()
    *_, older, _ = sorted(
        (path.name for path in run.directory.glob("checkpoints/step_*")), key=lambda name: int(name[5:])
    )
    (tmp_path / "agent.py").write_text(AGENT)
    agents = ("--agents.agent", f"{tmp_path}/agent.py:Agent", "--agents.args.worth", "0.5")
    ports = ("--gateway.server.port", "0", "--gateway.server.http-port", "0")
    flags = (*agents, *ports, "--orchestrator.max-steps", WITHOUT_END)
    fork = started(*flags, "--resume-from", f"small/{older}", name="fork")
    fork.until(f"step {report['steps'] + 2}/")
    fork.child("agents").terminate()
    assert fork.until("agents ended").startswith("agents ended with exit code 143; restart 1 of 3"), "it drained"
    fork.until("agents serves")
    fork.until("step ")
    fork.stop()
    assert fork.end() == 0, "\n".join(fork.seen)
    assert fork.seen[0].startswith(f"{fork.directory}: forked from small/{older}@")
    told = audit(sluice, fork.directory)
    assert told["exact"], told["differences"]
    assert (told["batches"], int(told["version"].partition(".")[0])) == (fork.report()["steps"], report["epochs"] + 1)
    last = max(fork.directory.glob("trajectories/step_*.jsonl"), key=lambda path: int(path.stem[5:]))
    rewards = {json.loads(row)["reward"] for row in last.read_text().splitlines()}
    assert rewards <= {0.25, 0.5}, "what the agent gave"
    assert audit(sluice, run.directory)["batches"] == report["steps"], "the old run is as it was"


def test_each_service_may_be_killed_once_is_a_principal_with_the_least_role_and_the_run_goes_on_and_is_forked(
    started, sluice, tmp_path: Path
) -> None:
    file = tmp_path / "principals.toml"
    roles = {"orchestrator": "admin", "trainer": "trainer", "rollout": "replica", "operator": "admin", "other": "agent"}
    for name, role in roles.items():
        (tmp_path / name).write_text(add_token(file, name, role))
    tokens = {name: str(tmp_path / name) for name in ("orchestrator", "trainer", "rollout")}
    run = started(
        *("--orchestrator.max-steps", WITHOUT_END, "--orchestrator.checkpoint.every-steps", "1"),
        *(
            "--trainer.warmup-steps",
            "0",
            "--orchestrator.evaluation.every-steps",
            "4",
            "--orchestrator.evaluation.prompts",
            "2",
        ),
        *("--security.principals-file", str(file), "--security.token-file", str(tmp_path / "operator")),
        *("--security.service-token-files", json.dumps(tokens)),
    )
    run.until("step 2/")
    change = ("set", "small", "trainer.lr=1.5e-9", "--output-dir", str(tmp_path))
    changed = sluice(*change)
    assert changed.out.startswith("trainer.lr: "), changed.err
    refused = sluice(*change, "--security.token-file", str(tmp_path / "other"))
    assert refused.code == 1
    assert "ROLE_REQUIRED" in refused.err
    peers = tomllib.loads((run.directory / "config.toml").read_text())["peers"]
    settings = next(word for word in run.child("orchestrator").cmdline() if word.endswith("settings.toml"))
    private = tomllib.loads(Path(settings).read_text())["security"]["dispatcher_token_file"]
    assert Path(private).stat().st_mode & 0o077 == 0
    assert asyncio.run(refusals(peers, SecurityConfig(token_file=private))) == {"ROLE_REQUIRED"}
    wait_for(lambda: "OrchestratorService/StopRun" in {each["method"] for each in refused_to_dispatcher(run.directory)})
    # After the trainer others follow, so that the run is forked from a checkpoint of its second epoch.
    for service in ("orchestrator", "trainer", "rollout", "weightsync"):
        run.child(service).kill()
        assert run.until(f"{service} ended").startswith(f"{service} ended with signal SIGKILL; restart 1 of 3")
        run.until(f"{service} serves")
        run.until("step ")
        if service == "orchestrator":  # a call to one of the others may fail when that one is killed
            assert set(codes(run, "orchestrator", "dispatcher", "trainer", "operator")) <= {"OK", "CANCELLED"}
    assert audit(sluice, run.directory)["exact"], "also while it runs"
    run.stop(SecurityConfig(token_file=tmp_path / "operator"))
    assert run.end() == 0, "\n".join(run.seen)
    report = run.report()
    assert report["stop_reason"] == "seen enough"
    told = audit(sluice, run.directory)
    assert told["exact"], told["differences"]
    assert told["batches"] == report["steps"]
    assert told["accepted"] == told["trained"] + sum(told["dropped"].values()) + told["in_flight"]
    assert_changed_by_the_operator(run)
    assert_written_calls(run)
    assert not any((tmp_path / name).read_text() in run.logs() for name in roles)
    fork_and_play(run, started, sluice, tmp_path)


def audit(sluice: Callable[..., Ended], directory: Path) -> dict[str, Any]:
    done = sluice("audit", str(directory), "--json")
    assert done.out, done.err
    told: dict[str, Any] = json.loads(done.out)
    assert done.code == (0 if told["exact"] else 1)
    return told
