"""vLLM beside gRPC, whose objects a fork inherits without their threads; and the end of a forked engine whose owner is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import pytest
from small_models import save_model

pytestmark = pytest.mark.slow

DEADLINE_S = 240.0
"""Limit for engines to start or to end; only a broken test takes so long."""

PROGRAM = """
import asyncio, gc, os, sys
import grpc, psutil
from rollout_svc.engines.base import GenerationRequest, Sampling
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from rollout_svc.engines.vllm.processes import prepare_environment

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

def make_engine():
    arguments = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 22}
    return VllmEngine(sys.argv[1], VllmOptions(engine_args=arguments, start_method="fork"))

async def serve(engine, grpc):
    await engine.start()
    children = psutil.Process().children(recursive=True)
    spawned = any("spawn_main" in " ".join(child.cmdline()) for child in children)
    result = await engine.sample(GenerationRequest("request", [5, 9], Sampling(max_tokens=4, ignore_eos=True)))
    print(f"{grpc}:", "spawned" if spawned else "forked", len(result.samples[0].token_ids), flush=True)
    await engine.stop()

async def main():
    gc.disable()
    engine = make_engine()
    for line in sys.stdin:
        pair = await used()
        if line.strip() == "closed":
            await close(*pair)
            pair = None
        await serve(engine, line.strip())
        if pair is not None:
            await close(*pair)
            pair = None

async def own():
    await make_engine().start()
    print("owner:", os.getpid(), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    prepare_environment(os.environ, workers=1)
    import vllm  # for both, before anything of gRPC lives
    owner = os.fork()
    if owner == 0:
        asyncio.run(own())
    asyncio.run(main())
    os.waitpid(owner, 0)
"""
"""The first process serves beside gRPC as it is asked to; its child owns an engine until it is killed."""


@dataclass
class Program:
    """A running program and what it has said."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def serve(self, grpc: str) -> str:
        """Let it start an engine, and return what it says of it."""
        assert self.process.stdin is not None
        print(grpc, file=self.process.stdin, flush=True)
        return self.said_of(grpc)

    def said_of(self, matter: str) -> str:
        assert self.process.stdout is not None
        while not (found := [line for line in self.lines if line.startswith(f"{matter}: ")]):
            self.lines.append(self.process.stdout.readline() or pytest.fail("".join(self.lines)))
        return found[0].removeprefix(f"{matter}: ").strip()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    root = tmp_path_factory.mktemp("program")
    (root / "program.py").write_text(PROGRAM)
    words = [sys.executable, str(root / "program.py"), str(save_model(root / "model", 1))]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        family = psutil.Process(process.pid)
        try:
            yield Program(process)
        finally:
            for each in [*family.children(recursive=True), family] if family.is_running() else []:
                each.kill()


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize(
    ("grpc", "answer"),
    [
        ("closed", "forked 4"),
        # In `make test`: test_forking.py finds each part of gRPC, and engines are spawned beside it in test_adapter_process.py.
        pytest.param("in use", "spawned 4", marks=pytest.mark.soak),
    ],
)
def test_the_engine_starts_after_grpc_was_used(program: Program, grpc: str, answer: str) -> None:
    assert program.serve(grpc) == answer


@pytest.mark.timeout(DEADLINE_S)
def test_killing_the_owner_leaves_no_process_behind(program: Program) -> None:
    """Of an engine that was forked; test_adapter_process.py kills the owner of one that was spawned."""
    owner = psutil.Process(int(program.said_of("owner")))
    children = owner.children(recursive=True)
    assert children
    owner.kill()
    gone, alive = psutil.wait_procs(children, DEADLINE_S)
    assert not alive, f"{gone} ended, {alive} did not"
    assert program.process.stdin is not None
    program.process.stdin.close()
    assert program.process.wait(DEADLINE_S) == 0
