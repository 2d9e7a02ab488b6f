"""The gateway as deploy/compose.yaml starts it, as a process beside an orchestrator with tokens: what docker tests see, without Docker."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from test_orchestrator_run import DEADLINE_S, make_scene

from sluice.rpc.server import free_ports

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROLES = ("agent", "admin", "dispatcher")


async def test_a_gateway_of_compose_is_healthy_and_asks_the_orchestrator_for_those_who_have_a_token(tmp_path) -> None:
    service = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["gateway"]
    words = [word for word in service["command"] if "$" not in word]
    words.insert(2, "examples/reverse_text/rl.toml")
    tokens = {role: tmp_path / f"{role}.token" for role in ROLES}
    for role, file in tokens.items():
        file.write_text(role * 8)
        file.chmod(0o600)
    names = dict(zip(ROLES, ("token_file", "admin_token_file", "dispatcher_token_file"), strict=True))
    security = {names[role]: file for role, file in tokens.items()}
    grpc_port, http_port = free_ports(2)
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [])
        scene.trainer.automatic = False
        running = scene.start(common={"security": security})
        flags = {f"security.{setting.replace('_', '-')}": file for setting, file in security.items()}
        flags |= {"run": "test", "output-dir": tmp_path, "peers.orchestrator": f"127.0.0.1:{scene.port}"}
        flags |= {"gateway.server.port": grpc_port, "gateway.server.http-port": http_port}
        argv = [*words, *(f"--{name}={value}" for name, value in flags.items())]
        gateway = await asyncio.create_subprocess_exec(sys.executable, "-m", "sluice.cli.main", *argv, cwd=ROOT)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=30))
        try:
            while True:
                assert gateway.returncode is None
                with contextlib.suppress(httpx.ConnectError):
                    refused = await http.post("/rl/sessions", json={})
                    break
                await asyncio.sleep(0.1)
            check = [*service["healthcheck"]["test"][2:-1], f"127.0.0.1:{grpc_port}"]
            health = await asyncio.create_subprocess_exec(sys.executable, "-m", "sluice.cli.main", *check)
            assert await health.wait() == 0
            headers = {"authorization": f"Bearer {tokens['agent'].read_text()}"}
            answer = await http.post("/rl/sessions", json={}, headers=headers)
        finally:
            with contextlib.suppress(ProcessLookupError):
                gateway.terminate()
            await gateway.wait()
            running.cancel()
            await asyncio.wait({running})
    assert refused.status_code == 401
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "NO_EXTERNAL_EPISODES")
