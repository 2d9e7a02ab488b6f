"""`sluice rollout` as a process: both ports serve, and SIGTERM lets what is under way end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import httpx
import pytest
from small_models import save_model

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
SETTINGS = """
run = "test"
model = "{model}"
[rollout]
engine = "transformers"
follow_weights = false
[rollout.server]
port = 0
http_port = 0
drain_s = 60.0
"""


async def listening(process: asyncio.subprocess.Process) -> str:
    """Where the process serves HTTP, as it logs it."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line.startswith(b"{") and "url" in (entry := json.loads(line)):
            return entry["url"]
    raise AssertionError("the process ended before it served HTTP")


async def test_sigterm_lets_a_stream_end(tmp_path):
    model = save_model(tmp_path / "model", 1)
    settings = tmp_path / "rollout.toml"
    settings.write_text(SETTINGS.format(model=model))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sluice.cli.main", "rollout", "@", str(settings),
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=DEADLINE_S) as http:
            url = await listening(process)
            log = asyncio.create_task(process.stdout.read())  # keeps the pipe from filling
            body = {"prompt": [5], "n": 4, "max_tokens": 400, "ignore_eos": True, "stream": True}
            events = []
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not events:
                        process.send_signal(signal.SIGTERM)
                    events.append(line)
            assert events[-2:] == ["data: [DONE]", ""]
            assert await process.wait() == 0
            assert b"Traceback" not in await log
            with pytest.raises(httpx.ConnectError):
                await http.get(f"{url}/health")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
