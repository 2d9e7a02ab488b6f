"""`sluice` programs around a trainer: started from one file, given the same batches in every epoch."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
from forked_programs import Forked, forked
from rank_programs import RankPrograms

from sluice.cli.init_model import ModelShape, init_model
from sluice.client import TrainerClient
from sluice.rpc import SluiceError
from sluice.v1 import tokens_pb2, trainer_pb2
from sluice.versions import Version

RUN = "proc"
START_S = 280.0
"""Real seconds for the next action of a program, its imports included; only a broken program takes this long."""


class Programs:
    """`sluice` programs of one run, from one file.

    Attributes:
        addresses: Where each is served: unix sockets, which no other test can take.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.addresses = {name: f"unix:{directory}/{name}.sock" for name in ("weightsync", "trainer")}
        model = directory / "tiny"
        init_model(model, ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48), seed=3)
        self.file = directory / "rl.toml"
        self.file.write_text(f"""
            run = "{RUN}"
            output_dir = "{directory / "outputs"}"
            model = "{model}"
            [peers]
            weightsync = "{self.addresses["weightsync"]}"
            [weightsync]
            server = {{ host = "{self.addresses["weightsync"]}" }}
            min_free_bytes = 0
            [trainer]
            lr = 1e-3
            threads = 1
            server = {{ host = "{self.addresses["trainer"]}" }}
            """)

    @asynccontextmanager
    async def program(
        self, name: str, *flags: str, launcher: tuple[str, ...] = ()
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run a service, with `launcher` before its module's name. Its log is in the same directory as the settings."""
        log = (self.directory / f"{name}.log").open("ab")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *launcher, "-m", "sluice.cli.main", name, "@", str(self.file), *flags),
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

    @asynccontextmanager
    async def forked(
        self, programs: RankPrograms, name: str, *, launcher: tuple[str, ...] = ()
    ) -> AsyncIterator[Forked]:
        """Run a service that needs PyTorch, without a new import of it; `launcher` is a module of the tests with arguments."""
        module, *arguments = (*launcher, "-m", "sluice.cli.main") if launcher else ("sluice.cli.main",)
        log = self.directory / f"{name}.log"
        async with forked(programs, module, *arguments, name, "@", str(self.file), log=log) as program:
            yield program

    def client(self) -> TrainerClient:
        return TrainerClient(self.addresses["trainer"])


async def ready(
    client: TrainerClient, process: asyncio.subprocess.Process | Forked
) -> trainer_pb2.GetTrainerStateResponse:
    """Poll until the trainer has loaded the model and waits for its first epoch. Return its state."""
    async with asyncio.timeout(START_S):
        while True:
            assert process.returncode is None, "the trainer ended while starting"
            try:
                state = await client.state(RUN)
            except SluiceError as error:
                if error.code is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.1)
                continue
            if state.phase == trainer_pb2.TRAINER_PHASE_READY:
                return state
            await asyncio.sleep(0.1)


async def reached(client: TrainerClient, phase: trainer_pb2.TrainerPhase.ValueType) -> None:
    async with asyncio.timeout(START_S):
        while True:
            if (await client.state(RUN)).phase == phase:
                return
            await asyncio.sleep(0.01)


def header(number: int, epoch: int, digest: str, count: int, run: str = RUN) -> trainer_pb2.BatchHeader:
    return trainer_pb2.BatchHeader(
        run=f"runs/{run}",
        batch_id=f"b{number}",
        sequence_no=number,
        target_version=Version(epoch, number).to_proto(),
        max_staleness=100,
        on_stale=trainer_pb2.STALE_POLICY_DROP,
        trajectory_count=count,
        tokenizer_digest=digest,
        advantage_estimator="grpo",
    )


async def train(
    client: TrainerClient, number: int, epoch: int, digest: str, run: str = RUN, *, learning_rate: float | None = None
) -> trainer_pb2.StepReport:
    """Submit the batch of this number, the same in every epoch, and wait for its report."""
    await submit(client, number, epoch, digest, run, learning_rate=learning_rate)
    async with aclosing(client.watch_steps(run, number, timeout_s=START_S)) as watch:
        async for response in watch:
            return response.step
    raise AssertionError("the stream ended without a report")


async def submit(
    client: TrainerClient, number: int, epoch: int, digest: str, run: str = RUN, *, learning_rate: float | None = None
) -> None:
    """Submit the batch of this number."""
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
    head = header(number, epoch, digest, len(rows), run)
    if learning_rate is not None:
        head.learning_rate = learning_rate
    await client.submit_batch(head, rows)
