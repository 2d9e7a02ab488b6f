"""The shell blocks of docs/protocol.md are one script: it runs as it stands against the real gateway and orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
from test_example_agents import Reverser
from test_external_episodes import EXTERNAL
from test_gateway_run import opened, served_gateway
from test_orchestrator_run import DEADLINE_S, make_scene

from orchestrator_svc.journal.store import read_facts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/protocol.md").read_text()

STAND_IN = f"""#!{sys.executable}
# Stands in for grpcurl, which is no package of Python's: the same words, the same JSON.
import sys
import grpc
from google.protobuf import json_format
from sluice.v1 import episode_pb2, episode_pb2_grpc

*options, target, method = sys.argv[1:]
headers = [each.split(": ") for option, each in zip(options, options[1:]) if option == "-H"]
name = method.removeprefix("sluice.v1.EpisodeService/")
call = episode_pb2.DESCRIPTOR.services_by_name["EpisodeService"].methods_by_name[name]
request = json_format.Parse(options[options.index("-d") + 1], getattr(episode_pb2, call.input_type.name)())
with grpc.insecure_channel(target) as channel:
    stub = getattr(episode_pb2_grpc.EpisodeServiceStub(channel), name)
    print(json_format.MessageToJson(stub(request, timeout=60, metadata=[*map(tuple, headers)])))
"""


def script() -> str:
    """All shell blocks of the page; a command that fails ends it."""
    return "set -euo pipefail\n" + "\n".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="curl and jq are not installed")
async def test_the_commands_of_the_page_play_episodes(tmp_path: Path) -> None:
    grpcurl = tmp_path / "bin/grpcurl"
    grpcurl.parent.mkdir()
    grpcurl.write_text(STAND_IN)
    grpcurl.chmod(0o755)
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [Reverser()])
        running = scene.start(**EXTERNAL)
        target, url = await stack.enter_async_context(served_gateway(scene))
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:  # until the services have found each other
            first = await opened(http)
            answer = await http.post(
                f"/rl/sessions/{first['id']}/end",
                json={"abandon": "not needed", "requeue": True},
                headers={"authorization": f"Bearer {first['settling_key']}"},
            )
            assert answer.status_code == 200, answer.text
        environment = {"PATH": f"{grpcurl.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        environment |= {"GATEWAY": url, "GRPC": target, "RUN": "test"}
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", script()),
            cwd=ROOT,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        running.cancel()
        await asyncio.wait({running})
    assert process.returncode == 0, said.decode()
    kinds = Counter(fact.WhichOneof("kind") for _, fact in read_facts(scene.run_dir))
    assert kinds["episode_submitted"] == 3
    assert kinds["reward_recorded"] == 3, "of a generation, late, and of a generation again"
    assert kinds["session_generation_recorded"] == 2 + 2 + 1 + 1, "repeats are not sampled again"


def test_every_reason_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", PAGE))
    sources = "".join(
        path.read_text()
        for package in ("gateway_svc", "orchestrator_svc", "sluice")
        for path in (ROOT / package).rglob("*.py")
    )
    assert len(named) > 20
    assert not {reason for reason in named if f'"{reason}"' not in sources}
