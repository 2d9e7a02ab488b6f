"""A real trainer and a real weight service on loopback, with a model that loads in a second."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sluice.cli.init_model import ModelShape, init_model
from sluice.client import TrainerClient
from sluice.config import CommonConfig, PeersConfig, SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, connect
from sluice.v1 import tokens_pb2, trainer_pb2, trainer_pb2_grpc, weightsync_pb2_grpc
from sluice.versions import Version
from trainer_svc.config import TrainerConfig
from trainer_svc.service.learner import Learner
from trainer_svc.service.servicer import TrainerServicer
from trainer_svc.service.trainer import Trainer
from weightsync.app import build_runs
from weightsync.config import WeightSyncConfig
from weightsync.publisher import AdapterPublisher, PolicyPublisher, WeightPublisher
from weightsync.service.servicer import WeightSyncServicer

RUN = "test"
TINY = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=256)
VOCABULARY = 128


def tiny_model(directory: Path) -> Path:
    path = directory / "tiny"
    init_model(path, TINY, seed=3)
    return path


def settings(model: Path, output_dir: Path, weightsync: str = "") -> CommonConfig:
    return CommonConfig(run=RUN, output_dir=output_dir, model=str(model), peers=PeersConfig(weightsync=weightsync))


@asynccontextmanager
async def weight_service(common: CommonConfig, port: int = 0) -> AsyncIterator[str]:
    """A weight service; gives its address."""
    config = WeightSyncConfig(min_free_bytes=0)
    runs = build_runs(common, config)
    servicer = WeightSyncServicer(runs)
    server = RpcServer("weightsync", ServerConfig(port=port), SecurityConfig())
    server.add(weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server, servicer, "sluice.v1.WeightSyncService")
    await server.start()
    try:
        yield server.target
    finally:
        await server.stop(0)
        await runs.close()


@asynccontextmanager
async def trainer_service(
    common: CommonConfig, config: TrainerConfig, *, load: bool = True
) -> AsyncIterator[tuple[Trainer, str]]:
    """A trainer, loaded unless told otherwise; gives it and its address."""
    channel = connect(common.peers.weightsync, common.security)
    publisher = PolicyPublisher(WeightPublisher(channel, common.run), AdapterPublisher(channel, common.run))
    trainer = Trainer(Learner(common, config), publisher)
    server = RpcServer("trainer", ServerConfig(), SecurityConfig(), run=common.run)
    server.add(
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(trainer), "sluice.v1.TrainerService"
    )
    await server.start()
    try:
        if load:
            await trainer.load()
        yield trainer, server.target
    finally:
        await server.stop(0)
        await trainer.stop(10.0)
        await channel.close()


def trainer_config(**options: Any) -> TrainerConfig:
    return TrainerConfig(**{"lr": 1e-3, "device": "cpu", "threads": 1, **options})


@dataclass
class Stack:
    """A trainer with its weight service, and a client."""

    trainer: Trainer
    client: TrainerClient
    target: str
    digest: str
    output_dir: Path

    def header(self, number: int, count: int, *, epoch: int = 1, **changes: Any) -> trainer_pb2.BatchHeader:
        values = {
            "run": f"runs/{RUN}",
            "batch_id": f"batch-{number}",
            "sequence_no": number,
            "target_version": Version(epoch, number).to_proto(),
            "max_staleness": 2,
            "on_stale": trainer_pb2.STALE_POLICY_DROP,
            "trajectory_count": count,
            "tokenizer_digest": self.digest,
            "advantage_estimator": "grpo",
        }
        return trainer_pb2.BatchHeader(**{**values, **changes})

    async def submit(
        self, number: int, trajectories: list[tokens_pb2.Trajectory] | None = None, **changes: Any
    ) -> trainer_pb2.SubmitBatchResponse:
        epoch = changes.get("epoch", 1)
        rows = batch(number, version=Version(epoch, number - 1)) if trajectories is None else trajectories
        return await self.client.submit_batch(self.header(number, len(rows), **changes), rows)

    async def report(self, number: int, timeout_s: float = 60.0) -> trainer_pb2.StepReport:
        """The report of one version, when it is there."""
        watch = self.client.watch_steps(RUN, number, timeout_s=timeout_s)
        async with contextlib.aclosing(watch):
            async for response in watch:
                return response.step
        raise AssertionError("the stream ended without a report")


@asynccontextmanager
async def stack(model: Path, output_dir: Path, **options: Any) -> AsyncIterator[Stack]:
    async with weight_service(settings(model, output_dir)) as address:
        common = settings(model, output_dir, address)
        async with (
            trainer_service(common, trainer_config(**options)) as (trainer, target),
            TrainerClient(target) as client,
        ):
            yield Stack(trainer, client, target, trainer.learner.tokenizer_digest, output_dir)


def trajectory(
    name: str,
    *,
    group: str = "g",
    versions: list[tuple[int, Version]] | None = None,
    reward: float | None = 1.0,
    prompt: int = 4,
    sampled: int = 6,
    seed: int = 0,
    **changes: Any,
) -> tokens_pb2.Trajectory:
    """A prompt and one answer, with plausible numbers."""
    random = np.random.default_rng(seed)
    values: dict[str, Any] = {
        "trajectory_id": name,
        "task_id": group,
        "group_id": group,
        "episode_id": name,
        "token_ids": random.integers(8, VOCABULARY - 8, prompt + sampled).tolist(),
        "mask_runs": [prompt, sampled],
        "logprobs": (-4.0 - random.random(sampled)).tolist(),
        "version_spans": [
            tokens_pb2.VersionSpan(start=start, policy_version=version.to_proto())
            for start, version in versions or [(0, Version(0, 0))]
        ],
        "temperature": 1.0,
        "finish_reason": tokens_pb2.FINISH_REASON_STOP,
    }
    if reward is not None:
        values["reward"] = reward
    return tokens_pb2.Trajectory(**{**values, **changes})


def batch(seed: int, *, version: Version, groups: int = 2, members: int = 4) -> list[tokens_pb2.Trajectory]:
    """Groups whose rewards differ, sampled by one version."""
    return [
        trajectory(
            f"s{seed}.g{group}.m{member}",
            group=f"s{seed}.g{group}",
            versions=[(0, version)],
            reward=float(member % 2),
            sampled=5 + member,
            seed=seed * 1000 + group * 10 + member,
        )
        for group in range(groups)
        for member in range(members)
    ]
