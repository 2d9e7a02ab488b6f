"""The gateway as deploy/compose.yaml starts it, as a process beside an orchestrator with tokens: what docker tests see, without Docker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import ChainMap
from pathlib import Path

import httpx
import pytest
import yaml
from test_orchestrator_run import DEADLINE_S, make_scene

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROLES = ("agent", "admin", "dispatcher")


def listening(log: Path) -> dict[str, str]:
    """Return where a service says that it listens: `target` for gRPC, `url` for HTTP."""
    records = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line[0] + line[-1] == "{\n"]
    return dict(ChainMap(*(each for each in records if each["event"] == "listening")))


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
    # Certificates between containers are tried where Docker is: here all is on loopback.
    none = dict.fromkeys(("tls_ca", "tls_cert", "tls_key", "principals_file", "tls_address_name"), "none")
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [])
        scene.trainer.automatic = False
        running = scene.start(common={"security": security})
        flags = {f"security.{setting.replace('_', '-')}": file for setting, file in (security | none).items()}
        flags |= {"security.insecure": "true"}
        flags |= {"run": "test", "output-dir": tmp_path, "peers.orchestrator": scene.target}
        flags |= {"gateway.server.port": 0, "gateway.server.http-port": 0, "log-level": "info"}
        argv = [*words, *(f"--{name}={value}" for name, value in flags.items())]
        output = stack.enter_context((tmp_path / "gateway.log").open("wb"))
        gateway = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sluice.cli.main", *argv, cwd=ROOT, stdout=output, stderr=output
        )
        try:
            while not {"target", "url"} <= (addresses := listening(tmp_path / "gateway.log")).keys():
                assert gateway.returncode is None, (tmp_path / "gateway.log").read_text()
                await asyncio.sleep(0.1)
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=addresses["url"], timeout=60))
            refused = await http.post("/rl/sessions", json={})
            check = [*service["healthcheck"]["test"][2:3], addresses["target"]]
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
