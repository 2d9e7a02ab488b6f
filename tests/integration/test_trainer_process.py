"""The trainer as a process: started from a file, killed, resumed, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sluice.cli.init_model import ModelShape, init_model
from sluice.client import TrainerClient
from sluice.rpc import SluiceError
from sluice.v1 import tokens_pb2, trainer_pb2
from sluice.versions import Version

RUN = "proc"
START_S = 60.0

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Programs:
    """`sluice` programs of one run, from one file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = {"weightsync": free_port(), "trainer": free_port()}
        model = directory / "tiny"
        init_model(model, ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48), seed=3)
        self.file = directory / "rl.toml"
        self.file.write_text(f"""
            run = "{RUN}"
            output_dir = "{directory / "outputs"}"
            model = "{model}"
            [peers]
            weightsync = "127.0.0.1:{self.ports["weightsync"]}"
            [weightsync]
            server = {{ port = {self.ports["weightsync"]} }}
            min_free_bytes = 0
            [trainer]
            lr = 1e-3
            threads = 1
            server = {{ port = {self.ports["trainer"]} }}
            """)

    @asynccontextmanager
    async def program(self, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
        log = (self.directory / f"{name}.log").open("ab")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from sluice.cli.main import main; raise SystemExit(main())",
            name,
            "@",
            str(self.file),
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            log.close()

    def client(self) -> TrainerClient:
        return TrainerClient(f"127.0.0.1:{self.ports['trainer']}")


async def ready(client: TrainerClient, process: asyncio.subprocess.Process) -> trainer_pb2.GetTrainerStateResponse:
    """Ask until the model is loaded."""
    async with asyncio.timeout(START_S):
        while True:
            assert process.returncode is None, "the trainer ended while starting"
            try:
                state = await client.state(RUN)
            except SluiceError:
                await asyncio.sleep(0.1)
                continue
            if state.phase != trainer_pb2.TRAINER_PHASE_STARTING:
                return state
            await asyncio.sleep(0.1)


async def reached(client: TrainerClient, phase: trainer_pb2.TrainerPhase.ValueType) -> None:
    async with asyncio.timeout(START_S):
        while True:
            if (await client.state(RUN)).phase == phase:
                return
            await asyncio.sleep(0.01)


def header(number: int, epoch: int, digest: str, count: int) -> trainer_pb2.BatchHeader:
    return trainer_pb2.BatchHeader(
        run=f"runs/{RUN}",
        batch_id=f"b{number}",
        sequence_no=number,
        target_version=Version(epoch, number).to_proto(),
        max_staleness=100,
        on_stale=trainer_pb2.STALE_POLICY_DROP,
        trajectory_count=count,
        tokenizer_digest=digest,
        advantage_estimator="grpo",
    )


async def train(client: TrainerClient, number: int, epoch: int, digest: str) -> trainer_pb2.StepReport:
    """Submit the batch of this number, the same in every epoch, and wait for its report."""
    rows = []
    for member in range(4):
        random = np.random.default_rng(100 * number + member)
        span = tokens_pb2.VersionSpan(start=0, policy_version=Version(0, 0).to_proto())
        rows.append(
            tokens_pb2.Trajectory(
                trajectory_id=f"{number}.{member}",
                group_id=f"g{number}",
                episode_id=f"{number}.{member}",
                token_ids=random.integers(8, 90, 12).tolist(),
                mask_runs=[5, 7],
                logprobs=(-4 - random.random(7)).tolist(),
                version_spans=[span],
                temperature=1.0,
                reward=float(member % 2),
            )
        )
    await client.submit_batch(header(number, epoch, digest, len(rows)), rows)
    async with aclosing(client.watch_steps(RUN, number, timeout_s=60)) as watch:
        async for response in watch:
            return response.step
    raise AssertionError("the stream ended without a report")


async def test_a_killed_trainer_resumes_exactly_and_a_stopped_one_ends_cleanly(tmp_path: Path) -> None:
    programs = Programs(tmp_path)
    checkpoints = tmp_path / "outputs" / RUN / "checkpoints"
    async with programs.program("weightsync"), programs.client() as client:
        async with programs.program("trainer") as trainer:
            digest = (await ready(client, trainer)).tokenizer_digest
            await client.begin_epoch(RUN, 1)
            await train(client, 1, 1, digest)
            await client.save_checkpoint(RUN)
            await train(client, 2, 1, digest)
            await train(client, 3, 1, digest)
            await client.save_checkpoint(RUN)
            uninterrupted = load_file(checkpoints / "step_3" / "hf" / "model.safetensors")
            trainer.kill()
            await trainer.wait()
        async with programs.program("trainer") as trainer:
            await ready(client, trainer)
            begun = await client.begin_epoch(RUN, 2, checkpoint="step_1")
            assert Version.from_proto(begun.policy_version) == Version(2, 1)
            await train(client, 2, 2, digest)
            await train(client, 3, 2, digest)
            await client.save_checkpoint(RUN)
            resumed = load_file(checkpoints / "step_3" / "hf" / "model.safetensors")
            assert all(torch.equal(resumed[name], tensor) for name, tensor in uninterrupted.items())
            trainer.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                assert await trainer.wait() == 0


async def test_a_signal_in_the_middle_of_a_long_step_ends_the_process_cleanly(tmp_path: Path) -> None:
    programs = Programs(tmp_path)
    programs.file.write_text(programs.file.read_text().replace("[trainer]", "[trainer]\n token_budget = 512"))
    async with programs.program("weightsync"), programs.client() as client, programs.program("trainer") as trainer:
        digest = (await ready(client, trainer)).tokenizer_digest
        await client.begin_epoch(RUN, 1)
        span = tokens_pb2.VersionSpan(start=0, policy_version=Version(0, 0).to_proto())
        rows = [
            tokens_pb2.Trajectory(
                trajectory_id=str(index),
                group_id=str(index),
                episode_id=str(index),
                token_ids=[9] * 500,
                mask_runs=[4, 496],
                logprobs=[-4.0] * 496,
                version_spans=[span],
                temperature=1.0,
                advantages=[1.0],
            )
            for index in range(4000)
        ]
        await client.submit_batch(header(1, 1, digest, len(rows)), rows)
        await reached(client, trainer_pb2.TRAINER_PHASE_TRAINING)
        trainer.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await trainer.wait() == 0
    assert "Traceback" not in (tmp_path / "trainer.log").read_text()


async def test_a_model_that_cannot_be_loaded_ends_the_process_with_the_reason(tmp_path: Path) -> None:
    programs = Programs(tmp_path)
    (tmp_path / "tiny" / "config.json").unlink()
    async with programs.program("trainer") as trainer:
        async with asyncio.timeout(START_S):
            assert await trainer.wait() == 2
    assert "config.json" in (tmp_path / "trainer.log").read_text()
