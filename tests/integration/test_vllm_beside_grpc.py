"""vLLM starts in a process that has used gRPC: a fork inherits gRPC's objects, but not its threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from small_models import save_model

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0

PROGRAM = """
import asyncio, gc, sys
import grpc, psutil
from rollout_svc.engines.base import GenerationRequest, Sampling
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions

async def used():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    await channel.channel_ready()
    return server, channel

async def close(server, channel):
    await channel.close()
    await server.stop(0)
    cycle = [server, channel]
    cycle.append(cycle)  # for the garbage collection of the next one who runs it

async def main(model, closed):
    gc.disable()
    pair = await used()
    if closed:
        await close(*pair)
        del pair
    arguments = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 22}
    engine = VllmEngine(model, VllmOptions(engine_args=arguments, start_method="fork"))
    await engine.start()
    spawned = any("spawn_main" in " ".join(child.cmdline()) for child in psutil.Process().children(recursive=True))
    result = await engine.sample(GenerationRequest("request", [5, 9], Sampling(max_tokens=4, ignore_eos=True)))
    print("spawned" if spawned else "forked", len(result.samples[0].token_ids), flush=True)
    await engine.stop()
    if not closed:
        await close(*pair)

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] == "closed"))
"""


@pytest.mark.parametrize(("grpc", "answer"), [("closed", "forked 4"), ("in use", "spawned 4")])
def test_the_engine_starts_after_grpc_was_used(tmp_path: Path, grpc: str, answer: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    model = save_model(tmp_path / "model", 1)
    words = [sys.executable, str(program), str(model), grpc]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert answer in done.stdout.splitlines(), done.stdout + done.stderr
    assert done.returncode == 0
