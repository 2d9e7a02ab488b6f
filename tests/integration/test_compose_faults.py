"""A run in containers through what operators do to it: each service replaced, each link cut, replicas added and removed."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_compose import ROOT, engine_runs, free_port, lend_the_torch_wheel

COMPARED = 50
"""Last steps whose mean reward is compared with that of an undisturbed run."""

NOISE = 0.05
"""Most difference of that mean: between seeds its standard deviation is 0.01."""

CUT_S = 8.0
"""Seconds that a link stays cut: longer than a call between services waits for its answer before it is made again."""

LINKS = (
    ("trainer", "weightsync"),
    ("rollout", "weightsync"),
    ("orchestrator", "trainer"),
    ("orchestrator", "rollout"),
    ("gateway", "orchestrator"),
    ("gateway", "rollout"),
)
"""Who calls whom."""

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not engine_runs(), reason="no Docker engine with compose v2 answers here"),
    pytest.mark.skipif(
        os.geteuid() != 0, reason="a link between two containers is cut in their network namespaces, as root"
    ),
]


class Stack:
    """The example of `deploy/compose.yaml`, as a project of its own."""

    def __init__(self, name: str, folder: Path, steps: int) -> None:
        self._name = name
        overlay = folder / f"{name}.json"
        files = ["@", "examples/reverse_text/rl.toml", "@", "deploy/docker/run.toml"]
        flags = ["--orchestrator.max-steps", str(steps), "--orchestrator.checkpoint.every-steps", "10"]
        overlay.write_text(json.dumps({"services": {"orchestrator": {"command": ["orchestrator", *files, *flags]}}}))
        self._files = ["-f", str(ROOT / "deploy/compose.yaml"), "-f", str(overlay)]
        ports = {each: str(free_port()) for each in ("ORCHESTRATOR_PORT", "GATEWAY_PORT", "GATEWAY_HTTP_PORT")}
        self._environment = {**os.environ, **ports, "COMPOSE_PROJECT_NAME": name}

    def compose(self, *words: str, timeout_s: float = 600) -> str:
        """Run a command of compose, and return what it printed."""
        argv = ["docker", "compose", *self._files, *words]
        done = subprocess.run(
            argv, env=self._environment, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT
        )
        assert done.returncode == 0, f"{words}: {done.stderr[-3000:]}"
        return done.stdout

    def up(self, *words: str) -> None:
        self.compose("up", "--detach", "--wait", *words, timeout_s=1500)

    def containers(self, service: str) -> list[str]:
        """Return the ids of the containers of a service."""
        return self.compose("ps", "--quiet", service).split()

    def outputs(self, *words: str) -> str:
        """Run a command in a container that sees the run's directory, and return what it printed."""
        return self.compose("run", "--rm", "--no-deps", "--entrypoint", words[0], "orchestrator", *words[1:])

    def rewards(self) -> dict[int, float]:
        """Return the mean reward by step, so far."""
        path = "/run/sluice/outputs/reverse_text/metrics.jsonl"
        lines = map(json.loads, self.compose("exec", "trainer", "cat", path).splitlines())
        return {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}

    def step(self) -> int:
        return max(self.rewards(), default=0)

    def until_step(self, number: int, within_s: float = 300) -> None:
        deadline = time.monotonic() + within_s
        while self.step() < number:
            assert self.containers("orchestrator"), f"the run has ended before step {number}:\n{self.logs()}"
            assert time.monotonic() < deadline, f"no step {number} within {within_s:g} s:\n{self.logs()}"
            time.sleep(1)

    def steer(self, command: str) -> str:
        """Run a command for a run that lives, such as ``status``, and return what it printed."""
        words = (command, "reverse_text", "@", "deploy/docker/run.toml")
        return self.compose("exec", "orchestrator", "sluice", *words)

    def until_end(self) -> None:
        deadline = time.monotonic() + 600
        while self.containers("orchestrator"):
            assert time.monotonic() < deadline, f"the run does not end:\n{self.logs()}"
            time.sleep(1)

    def logs(self) -> str:
        return self.compose("logs", "--tail", "20")

    def audit(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.outputs("sluice", "audit", "/run/sluice/outputs/reverse_text", "--json"))
        return told


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Stack]]:
    lend_the_torch_wheel()
    folder = tmp_path_factory.mktemp("compose")
    made: list[Stack] = []

    def make(name: str, steps: int) -> Stack:
        made.append(Stack(name, folder, steps))
        made[-1].compose("build", timeout_s=1500)
        made[-1].up()
        return made[-1]

    yield make
    for each in made:
        each.compose("down", "--volumes", "--remove-orphans")


def network_of(container: str) -> tuple[str, str]:
    """Return the process id and the address of a container."""
    form = "{{.State.Pid}} {{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    said = subprocess.run(["docker", "inspect", "-f", form, container], capture_output=True, text=True, check=True)
    pid, address = said.stdout.split()
    return pid, address


def drop(pid: str, peer: str, *, until_s: float) -> None:
    """Let packets between a container and a peer vanish for some seconds."""
    rules = [("OUTPUT", "-d"), ("INPUT", "-s")]
    for verb in ("-A", "-D"):
        for chain, side in rules:
            command = ["nsenter", "-t", pid, "-n", "iptables", verb, chain, side, peer, "-j", "DROP"]
            subprocess.run(command, check=True, capture_output=True)
        if verb == "-A":
            time.sleep(until_s)


def reward(stack: Stack) -> float:
    by_step = stack.rewards()
    last = [by_step[step] for step in sorted(by_step)[-COMPARED:]]
    return sum(last) / len(last)


def test_a_run_survives_replaced_services_cut_links_and_more_and_fewer_replicas(
    stack: Callable[[str, int], Stack],
) -> None:
    run = stack("sluice-faults", 100_000)
    run.until_step(5)
    for service in ("weightsync", "trainer", "rollout", "orchestrator", "gateway"):
        before, begin = run.step(), time.monotonic()
        (old,) = run.containers(service)
        run.up("--no-deps", "--force-recreate", service)
        assert run.containers(service) != [old], "another container"
        run.until_step(before + 5)
        print(f"{service} replaced at step {before}: further steps after {time.monotonic() - begin:.1f} s")
    for caller, called in LINKS:
        before, begin = run.step(), time.monotonic()
        pid, _ = network_of(*run.containers(caller))
        _, peer = network_of(*run.containers(called))
        drop(pid, peer, until_s=CUT_S)
        run.until_step(before + 5)
        print(
            f"{caller} -> {called} cut for {CUT_S:g} s at step {before}: further steps after {time.monotonic() - begin:.1f} s"
        )
    for replicas in (3, 1):
        before, begin = run.step(), time.monotonic()
        run.up("--no-deps", "--no-recreate", "--scale", f"rollout={replicas}", "rollout")
        assert len(run.containers("rollout")) == replicas
        run.until_step(before + 5)
        print(f"{replicas} replicas at step {before}: further steps after {time.monotonic() - begin:.1f} s")
    print(run.steer("status"))
    run.steer("stop")
    run.until_end()
    disturbed, told = reward(run), run.audit()
    assert told["exact"], told["differences"]
    steps = max(run.rewards())
    assert told["batches"] == steps
    run.compose("down", "--volumes", "--remove-orphans")

    calm = stack("sluice-calm", steps)
    calm.until_end()
    undisturbed, other = reward(calm), calm.audit()
    assert other["exact"], other["differences"]
    print(f"reward of the last {COMPARED} steps: {disturbed:.3f}, undisturbed {undisturbed:.3f}; audits exact: {told}")
    assert abs(disturbed - undisturbed) < NOISE
