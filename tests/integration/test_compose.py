"""The example in containers: four services, a gateway, and what prepares them, each in an image of its own."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from testcontainers.compose import DockerCompose

from sluice.client import OrchestratorClient
from sluice.config import SecurityConfig

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
def admin(compose: DockerCompose, tmp_path_factory: pytest.TempPathFactory) -> SecurityConfig:
    """The shared token, as an operator reads it."""
    token, _, _ = compose.exec_in_container(["cat", "/run/sluice/secrets/admin.token"], "orchestrator")
    file = tmp_path_factory.mktemp("secrets") / "admin.token"
    file.write_text(token)
    return SecurityConfig(token_file=file, admin_token_file=file)


def test_every_service_is_healthy(compose: DockerCompose) -> None:
    health = {each.Service: each.Health for each in compose.get_containers()}
    assert {name: health.get(name) for name in SERVICES} == dict.fromkeys(SERVICES, "healthy")


def test_the_gateway_asks_the_orchestrator_for_those_who_have_a_token(
    compose: DockerCompose, gateway_port: int
) -> None:
    """The run has no external episodes, which the orchestrator alone knows."""
    url = f"http://127.0.0.1:{gateway_port}/rl/sessions"
    assert httpx.post(url, json={}).status_code == 401
    token, _, _ = compose.exec_in_container(["cat", "/run/sluice/secrets/agent.token"], "gateway")
    answer = httpx.post(url, json={}, headers={"authorization": f"Bearer {token.strip()}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "NO_EXTERNAL_EPISODES")


async def test_rewards_arrive(port: int, admin: SecurityConfig) -> None:
    async with OrchestratorClient(f"127.0.0.1:{port}", admin) as client:
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
