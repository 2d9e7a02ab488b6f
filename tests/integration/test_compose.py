"""The example in containers: four services, a gateway, and what prepares them, each in an image of its own."""

import asyncio
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from testcontainers.compose import DockerCompose

from sluice.client import OrchestratorClient
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError

ROOT = Path(__file__).parents[2]
SERVICES = {"weightsync", "trainer", "rollout", "orchestrator", "gateway"}
FIRST_REWARD_S = 600


def engine_runs() -> bool:
    if shutil.which("docker") is None:
        return False
    found = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return (
        found.returncode == 0
        and subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=30).returncode == 0
    )


pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not engine_runs(), reason="no Docker engine with compose v2 answers here"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def gateway_port() -> int:
    """The HTTP port at which agents of this machine reach the gateway."""
    return free_port()


def lend_the_torch_wheel() -> None:
    """Builds take the CPU wheel of torch from this machine's sources where PyTorch's own index is out of reach."""
    pins = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    wheels = ROOT / "deploy" / "docker" / "wheels"
    if not any(wheels.glob("torch-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), torch]
        subprocess.run(command, check=False, timeout=300)


@pytest.fixture(scope="module")
def compose(port: int, gateway_port: int) -> Iterator[DockerCompose]:
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
    lend_the_torch_wheel()
    os.environ["ORCHESTRATOR_PORT"] = str(port)
    os.environ["GATEWAY_HTTP_PORT"] = str(gateway_port)
    os.environ["GATEWAY_PORT"] = str(free_port())
    os.environ["COMPOSE_PROJECT_NAME"] = "sluice-test"
    stack = DockerCompose(ROOT, compose_file_name="deploy/compose.yaml", build=True, wait=True, keep_volumes=False)
    with stack:
        yield stack


@pytest.fixture(scope="module")
def authority(compose: DockerCompose, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and the agents' token, as an operator copies them."""
    folder = tmp_path_factory.mktemp("authority")
    command = ["docker", "compose", "-f", "deploy/compose.yaml", "cp", "prepare:/run/sluice/authority/.", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return folder


def inspected(compose: DockerCompose, service: str) -> dict[str, Any]:
    """What the engine says of a container."""
    name = compose.get_container(service, include_all=True).ID
    said = subprocess.run(["docker", "inspect", str(name)], check=True, capture_output=True, timeout=60)
    facts: dict[str, Any] = json.loads(said.stdout)[0]
    return facts


def test_every_service_is_healthy(compose: DockerCompose) -> None:
    health = {each.Service: each.Health for each in compose.get_containers()}
    assert {name: health.get(name) for name in SERVICES} == dict.fromkeys(SERVICES, "healthy")


def test_the_gateway_asks_the_orchestrator_for_those_who_have_a_token(authority: Path, gateway_port: int) -> None:
    """The run has no external episodes, which the orchestrator alone knows."""
    url, trust = (
        f"https://127.0.0.1:{gateway_port}/rl/sessions",
        ssl.create_default_context(cafile=authority / "ca.pem"),
    )
    assert httpx.post(url, json={}, verify=trust).status_code == 401
    token = (authority / "agent.token").read_text().strip()
    answer = httpx.post(url, json={}, headers={"authorization": f"Bearer {token}"}, verify=trust)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "NO_EXTERNAL_EPISODES")


async def test_rewards_arrive(port: int, authority: Path) -> None:
    async with OrchestratorClient(f"127.0.0.1:{port}", SecurityConfig(certs_dir=authority)) as client:
        async for response in client.watch("reverse_text", timeout_s=FIRST_REWARD_S):
            event = response.event
            if event.WhichOneof("kind") == "group_scored":
                assert len(event.group_scored.episodes) == 8
                assert all(0 <= reward <= 1 for reward in (each.reward for each in event.group_scored.episodes))
                return
    pytest.fail("the run ended without a scored group")


def test_processes_run_without_privileges(compose: DockerCompose) -> None:
    for name in SERVICES:
        user, _, _ = compose.exec_in_container(["id", "-u"], name)
        assert user.strip() == "10001"
        status, _, _ = compose.exec_in_container(["cat", "/proc/1/status"], name)
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert {int(facts[each], 16) for each in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert facts["NoNewPrivs"] == "1"


def test_images_cannot_be_written_to(compose: DockerCompose) -> None:
    for name in SERVICES:
        probe = "for d in / /app /opt/venv /run/sluice /run/sluice/secrets /run/sluice/model; do touch $d/x 2>/dev/null && echo $d; done; true"
        written, _, _ = compose.exec_in_container(["sh", "-c", probe], name)
        assert written.split() == [], name
        written, _, _ = compose.exec_in_container(["sh", "-c", "touch /tmp/x /run/sluice/outputs/x && echo both"], name)
        assert written.strip() == "both"


def test_a_container_sees_its_own_secrets_alone(compose: DockerCompose, authority: Path) -> None:
    keys = set()
    for name in SERVICES:
        listed, _, _ = compose.exec_in_container(["ls", "/run/sluice/secrets"], name)
        assert listed.split() == ["ca.pem", "principals.toml", "tls.key", "tls.pem"]
        others, _, _ = compose.exec_in_container(["sh", "-c", "ls /run/sluice/authority"], name)
        assert others == "", "who holds the authority's key can pose as any service"
        key, _, _ = compose.exec_in_container(["cat", "/run/sluice/secrets/tls.key"], name)
        assert key.strip() == (authority / f"{name}.key").read_text().strip()
        keys.add(key)
    assert len(keys) == len(SERVICES)


async def test_nothing_is_told_without_a_certificate(port: int, gateway_port: int) -> None:
    with pytest.raises(httpx.TransportError):
        await asyncio.to_thread(httpx.get, f"http://127.0.0.1:{gateway_port}/health")
    async with OrchestratorClient(f"127.0.0.1:{port}", SecurityConfig()) as client:
        with pytest.raises(SluiceError):
            await client.run("reverse_text")


def test_memory_and_processes_of_a_container_are_bounded(compose: DockerCompose) -> None:
    for name in SERVICES:
        host = inspected(compose, name)["HostConfig"]
        assert host["PidsLimit"] == 4096
        assert 4 << 30 <= host["Memory"] <= 16 << 30


def test_a_service_that_dies_is_started_again(compose: DockerCompose) -> None:
    program = "first=$(cat /proc/1/task/1/children); cd /proc/${first% }/task; kill -9 $(cat ${first% }/children)"
    compose.exec_in_container(["sh", "-c", program], "gateway")
    deadline = time.monotonic() + FIRST_REWARD_S
    while (facts := inspected(compose, "gateway"))["State"].get("Health", {}).get("Status") != "healthy" or (
        facts["RestartCount"] == 0
    ):
        assert time.monotonic() < deadline, facts["State"]
        time.sleep(1)


def test_a_service_that_failed_for_good_is_not_started_again(compose: DockerCompose, tmp_path: Path) -> None:
    """Its last log line says so, and its exit code is 0 for compose alone."""
    command = [
        "gateway",
        "@",
        "examples/reverse_text/rl.toml",
        "@",
        "deploy/docker/run.toml",
        "--gateway.server.port=nine",
    ]
    overlay = tmp_path / "overlay.json"
    overlay.write_text(json.dumps({"services": {"gateway": {"command": command}}}))
    words = ["docker", "compose", "-p", "sluice-final", "-f", "deploy/compose.yaml", "-f", str(overlay)]
    ports = {each: str(free_port()) for each in ("ORCHESTRATOR_PORT", "GATEWAY_PORT", "GATEWAY_HTTP_PORT")}

    def run(*more: str) -> str:
        return subprocess.run(
            [*words, *more],
            cwd=ROOT,
            env={**os.environ, **ports},
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout

    try:
        run("up", "--detach", "--no-deps", "gateway")
        (container,) = run("ps", "--all", "--quiet", "gateway").split()
        subprocess.run(["docker", "wait", container], check=True, capture_output=True, timeout=300)
        facts = json.loads(subprocess.run(["docker", "inspect", container], check=True, capture_output=True).stdout)[0]
        logs = run("logs", "gateway")
    finally:
        run("down", "--volumes")
    assert (facts["State"]["ExitCode"], facts["RestartCount"], facts["State"]["Status"]) == (0, 0, "exited")
    assert "gateway.server.port" in logs
    assert "ended with exit code 2, for good" in logs
