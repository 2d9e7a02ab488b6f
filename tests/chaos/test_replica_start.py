"""A replica that cannot serve says why, exits with an error and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from small_models import save_model

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0


async def rollout(*words: str) -> tuple[int | None, str]:
    """Run `sluice rollout` to its end; its exit code and all that it wrote."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.cli.main", "rollout", *words),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode()


async def test_the_end_of_the_forked_engine_does_not_hide_why_the_replica_failed(tmp_path: Path):
    # The engine's process is a fork: the SIGTERM that ends it must not reach this process by a shared wake-up socket.
    model = save_model(tmp_path / "model", 1)
    stage = tmp_path / "stage"
    code, output = await rollout(
        *("--model", str(model), "--output-dir", str(tmp_path), "--stage-dir", str(stage)),
        *("--engine", "vllm", "--max-model-len", "64"),
        *("--server.host", "unix:/proc/none/socket"),  # a port that is taken is known before the engine starts
    )
    assert code == 4
    assert output.rstrip().splitlines()[-1].startswith("sluice: cannot listen on unix:/proc/none/socket")
    assert "stopped while starting" not in output
    assert "Exception ignored" not in output
    assert not stage.exists() or list(stage.iterdir()) == []


async def test_an_address_that_may_not_be_used_is_refused_before_the_engine_is_started(tmp_path: Path):
    model = save_model(tmp_path / "model", 1)
    code, output = await rollout(*("--model", str(model), "--output-dir", str(tmp_path), "--server.host", "0.0.0.0"))
    assert code == 2
    assert "0.0.0.0" in output
    assert "vllm started" not in output
