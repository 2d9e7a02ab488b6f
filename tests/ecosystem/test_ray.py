"""`sluice ray rl` on a cluster of four nodes: dead actors, a dead node, what cannot be placed, and a job that is stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from contract.certificates import Authority
from learning_run import STEPS, learned, make_model, settings

from sluice.rpc.principals import add_token

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-ecosystem-ray/bin/python"
NODES = [f"10.77.0.{number}" for number in range(1, 5)]
DASHBOARD = f"http://{NODES[0]}:8265"

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"{PYTHON.parent.parent.name} is not there: run `make install-ecosystem`"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root"),
    pytest.mark.skipif(
        not (shutil.which("ip") and shutil.which("unshare")), reason="needs the programs ip and unshare"
    ),
]


class Nodes:
    """The cluster, in a network namespace of its own."""

    def __init__(self, log: Path) -> None:
        argv = ["unshare", "--net", str(PYTHON), str(Path(__file__).with_name("ray_cluster.py")), "4"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=log.open("w"), text=True)
        self._answer()

    def ask(self, *words: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("{", '"')):
                return json.loads(line)
        raise AssertionError("the cluster has ended")

    def start(self, *argv: str, **options: Any) -> subprocess.Popen[str]:
        """Start a program in the namespace."""
        inside = ("nsenter", f"--net=/proc/{self._process.pid}/ns/net", *argv)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment, **options
        )

    def holder(self, *words: str) -> psutil.Process:
        """Return the process of the actor whose service has these arguments."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            line = process.cmdline()
            if "sluice.cli.main" in line and set(words) <= set(line):
                parent = process.parent()
                assert parent is not None
                return parent
        raise AssertionError(f"no service {words}")

    def services(self) -> list[list[str]]:
        found = psutil.Process(self._process.pid).children(recursive=True)
        return [line for process in found if "sluice.cli.main" in (line := process.cmdline()) and "ray" not in line]

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    cluster = Nodes(tmp_path_factory.mktemp("ray") / "cluster.log")
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


class Driver:
    """A `sluice ray rl` under way."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self.process, self.directory = process, directory
        self.seen: list[str] = []

    def until(self, *patterns: str) -> None:
        """Read on until each pattern was at the beginning of a line."""
        left = set(patterns)
        for line in self.lines():
            left -= {each for each in left if re.match(each, line)}
            if not left:
                return
        raise AssertionError(f"no line begins with {left}:\n" + "\n".join(self.seen))

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(line.rstrip())
            yield self.seen[-1]

    def end(self) -> int:
        list(self.lines())
        return self.process.wait(timeout=60)

    def peers(self) -> dict[str, str]:
        return tomllib.loads((self.directory / "config.toml").read_text())["peers"]


def words(model: Path, output: Path, *flags: str) -> list[str]:
    return [str(PYTHON), "-m", "sluice.cli.main", "ray", "rl", *settings(model, output, "small"), *flags]


@pytest.fixture
def secured(tmp_path: Path) -> list[str]:
    """Flags of TLS, and of a principal for each service."""
    certificate, key = Authority(tmp_path / "tls").issue("node", address=NODES)
    file = tmp_path / "principals.toml"
    for name, role in {
        "orchestrator": "admin",
        "trainer": "trainer",
        "rollout": "replica",
        "operator": "admin",
    }.items():
        (tmp_path / name).write_text(add_token(file, name, role))
    tokens = {name: str(tmp_path / name) for name in ("orchestrator", "trainer", "rollout")}
    return [
        *("--security.tls-cert", str(certificate), "--security.tls-key", str(key)),
        *("--security.tls-ca", str(tmp_path / "tls/ca.pem")),
        *("--security.principals-file", str(file), "--security.token-file", str(tmp_path / "operator")),
        *("--security.service-token-files", json.dumps(tokens)),
    ]


def audit(directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "sluice.cli.main", "audit", str(directory), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_run_that_loses_actors_and_a_node_goes_on_elsewhere_and_loses_nothing(
    nodes: Nodes, model: Path, tmp_path: Path, secured: list[str]
) -> None:
    run = Driver(nodes.start(*words(model, tmp_path, "--replicas", "2", *secured)), tmp_path / "small")
    run.until("step 4/")
    assert nodes.holder("rollout", "rollout-1").name().startswith("ray::")
    first = run.peers()
    lost = first["orchestrator"].rpartition(":")[0]
    assert first["weightsync"].rpartition(":")[0] == lost != NODES[0]

    for words_of, name in ((("rollout", "rollout-1"), "rollout-1"), (("trainer",), "trainer")):
        nodes.holder(*words_of).kill()
        run.until(f"{name} lost its actor; restart 1 of 3")
    run.until("rollout-1 serves", "trainer serves")
    run.until("step ")
    assert run.peers()["trainer"] == first["trainer"], "on its node, with its port"

    memory = nodes.ask("memory")
    nodes.ask("kill", lost)
    again = r"(trainer|rollout-\d) starts again: a peer has another address"
    run.until("orchestrator lost its actor", "weightsync lost its actor", "orchestrator serves", again)
    run.until("step ")
    moved = run.peers()
    assert moved["orchestrator"].rpartition(":")[0] not in (lost, NODES[0])

    assert run.end() == 0, "\n".join(run.seen)
    assert run.seen[-1].startswith(f"run small done: {STEPS} steps")
    for number, line in enumerate(run.seen):
        if name := re.match(again, line):
            after = [each for each in run.seen[number + 1 :] if each.startswith(f"{name[1]} ")]
            assert any("serves" in each for each in after), (
                f"{name[1]} was started again, and lost from sight:\n{run.seen}"
            )
    told = audit(run.directory)
    assert told["exact"], told["differences"]
    assert told["batches"] == STEPS
    assert told["accepted"] == told["trained"] + sum(told["dropped"].values()) + told["in_flight"]
    print(f"reward of the last steps: {learned(run.directory):.3f}")
    assert not nodes.services()
    created = nodes.ask("created")
    assert created["bytes"] == 8 * created["objects"], "Ray makes one object of 8 bytes for each of its processes"
    print("memory in MiB:", {name: size >> 20 for name, size in memory.items()})
    logs = "".join(path.read_text() for path in sorted((run.directory / "logs").iterdir()))
    secrets = [(tmp_path / name).read_text().strip() for name in ("orchestrator", "trainer", "rollout", "operator")]
    assert not any(each in logs + "\n".join(run.seen) for each in secrets)


def test_what_cannot_be_placed_in_time_is_named_with_what_the_cluster_has(
    nodes: Nodes, model: Path, tmp_path: Path
) -> None:
    flags = ("--insecure", "--machines", "2x8", "--allocation-mode", "transformers:d1+fsdp:d8", "--place-deadline", "1")
    run = Driver(nodes.start(*words(model, tmp_path, *flags)), tmp_path / "small")
    assert run.end() == 1
    said = "\n".join(run.seen)
    assert "not placed within 1 s (--place-deadline): no node is large enough for trainer (8 CPU, 8 GPU)" in said
    assert any(f"{node} 4 CPU, 4 GPU" in said for node in NODES)  # one of them may be lost by now


def test_a_directory_that_a_node_does_not_see_is_refused_where_state_would_be_kept(
    nodes: Nodes, model: Path, tmp_path: Path
) -> None:
    mounted = tmp_path / "mine"
    mounted.mkdir()
    shell = 'mount -t tmpfs none "$0" && exec "$@"'  # seen by this process alone
    argv = words(model, mounted, "--insecure", "--replicas", "1")
    run = Driver(nodes.start("unshare", "--mount", "sh", "-c", shell, str(mounted), *argv), mounted / "small")
    assert run.end() == 2
    assert re.search(rf"node 10\.77\.0\.\d does not see the driver's {mounted}/small", run.seen[-1])
    assert not nodes.services()


def test_a_job_runs_it_and_stopping_the_job_drains_it(nodes: Nodes, model: Path, tmp_path: Path) -> None:
    job = (str(PYTHON.with_name("ray")), "job")
    entry = " ".join(words(model, tmp_path, "--plain", "--orchestrator.max-steps", "100000"))
    run = Driver(
        nodes.start(
            *job,
            "submit",
            "--address",
            DASHBOARD,
            "--submission-id",
            "small",
            "--",
            "sh",
            "-c",
            f"cd {ROOT} && exec {entry}",
        ),
        tmp_path / "small",
    )
    run.until("step 2/")
    stop = nodes.start(*job, "stop", "--address", DASHBOARD, "small")
    assert stop.wait(timeout=60) == 0
    run.end()
    assert any("stopping the services" in line for line in run.seen)
    told = audit(run.directory)
    assert told["exact"], told["differences"]
    assert not nodes.services()
    assert (run.directory / "certs/operator.pem").exists(), "mutual TLS, with nothing to set up"
    assert not list((run.directory / "certs").glob("ca*.key")), "nobody can issue further certificates"
