"""The trainer as two ranks under torchrun: the same versions as one process, and a killed rank costs no result."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from trainer_programs import RUN, START_S, Programs, ready, submit, train
from weightsync_stack import eventually

from sluice.client import TrainerClient
from sluice.config import CommonConfig, PeersConfig, SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, SluiceError, connect
from sluice.v1 import trainer_pb2_grpc
from sluice.versions import Version
from trainer_svc.config import TrainerConfig
from trainer_svc.service.learner import Learner
from trainer_svc.service.servicer import TrainerServicer
from trainer_svc.service.trainer import Trainer
from weightsync.publisher import PolicyPublisher, WeightPublisher

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
ALONE = "alone"
TOLERANCE = 1e-6
FAILURE_S = 60.0
"""Within this time of a rank's death whoever waits must hear of it."""

pytestmark = pytest.mark.slow


@asynccontextmanager
async def one_process(programs: Programs) -> AsyncIterator[tuple[Trainer, TrainerClient]]:
    """A trainer of the same model, in this process, as a run of its own."""
    target = programs.addresses["weightsync"]
    common = CommonConfig(
        run=ALONE,
        output_dir=programs.directory / "outputs",
        model=str(programs.directory / "tiny"),
        peers=PeersConfig(weightsync=target),
    )
    channel = connect(target, SecurityConfig())
    config = TrainerConfig(lr=1e-3, threads=1, device="cpu")
    trainer = Trainer(Learner(common, config), PolicyPublisher(WeightPublisher(channel, ALONE)))
    server = RpcServer("trainer", ServerConfig(), SecurityConfig(), run=ALONE)
    add = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    server.add(add, TrainerServicer(trainer), "sluice.v1.TrainerService")
    await server.start()
    try:
        await trainer.load()
        async with TrainerClient(server.target) as client:
            yield trainer, client
    finally:
        await server.stop(0)
        await trainer.stop(10.0)
        await channel.close()


async def published(programs: Programs, version: Version) -> dict[str, torch.Tensor]:
    directory = programs.directory / "outputs" / RUN / "weights" / f"v{version}"
    await eventually((directory / "manifest.json").exists)
    return {name: each for path in directory.glob("*.safetensors") for name, each in load_file(path).items()}


async def reported(client: TrainerClient, number: int) -> None:
    """Wait for a step's report as long as the trainer lets us."""
    async with aclosing(client.watch_steps(RUN, number, timeout_s=2 * FAILURE_S)) as watch:
        await anext(watch)


def rank(torchrun: int, number: int) -> psutil.Process:
    return next(child for child in psutil.Process(torchrun).children() if child.environ().get("RANK") == str(number))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - tensor).abs().max()) for name, tensor in other.items())


async def test_two_ranks_train_what_one_process_trains_and_survive_the_death_of_one(tmp_path: Path) -> None:
    programs = Programs(tmp_path)
    programs.file.write_text(programs.file.read_text().replace("[weightsync]", "[weightsync]\n dense_delay_s = 0"))
    async with (
        programs.program("weightsync"),
        programs.client() as client,
        programs.program("trainer", launcher=TORCHRUN) as torchrun,
    ):
        digest = (await ready(client, torchrun)).tokenizer_digest
        async with one_process(programs) as (reference, alone):

            async def both_train(number: int, epoch: int, rate: float | None = None) -> None:
                """One batch to each; what the ranks publish is what one process holds."""
                report = await train(client, number, epoch, digest, learning_rate=rate)
                expected = await train(alone, number, 1, digest, run=ALONE, learning_rate=rate)
                assert report.metrics["learning_rate"] == expected.metrics["learning_rate"]
                assert report.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=TOLERANCE)
                assert list(report.results) == list(expected.results), "each trajectory has its own answer on any rank"
                assert report.metrics["loss_tokens"] == expected.metrics["loss_tokens"] == 28
                weights = await published(programs, Version(epoch, number))
                assert (
                    distance(weights, reference.learner.engine.named_tensors(reference.learner.publish_dtype))
                    <= TOLERANCE
                )

            await client.begin_epoch(RUN, 1)
            await alone.begin_epoch(ALONE, 1)
            await both_train(1, 1)
            await both_train(2, 1)
            await client.save_checkpoint(RUN)

            victim = rank(torchrun.pid, 1)
            os.kill(victim.pid, signal.SIGSTOP)  # holds rank 0 in the middle of a step
            await submit(client, 3, 1, digest)
            os.kill(victim.pid, signal.SIGKILL)
            with pytest.raises(SluiceError):
                await asyncio.wait_for(reported(client, 3), FAILURE_S)

            await ready(client, torchrun)
            begun = await client.begin_epoch(RUN, 2)
            assert Version.from_proto(begun.policy_version) == Version(2, 2)
            assert begun.last_batch_id == "b2"
            await both_train(3, 2)
            await both_train(4, 2, rate=0.01)  # every rank has to change it
            await both_train(5, 2)

            before = [rank(torchrun.pid, number).pid for number in (0, 1)]
            await train(client, 6, 2, digest)  # its version is on its way when the epoch ends
            again = await client.begin_epoch(RUN, 3)
            assert Version.from_proto(again.policy_version) == Version(3, 2)
            await train(client, 3, 3, digest)
            assert [rank(torchrun.pid, number).pid for number in (0, 1)] == before, "the ranks went on"

        ranks = [rank(torchrun.pid, number) for number in (0, 1)]
        torchrun.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, START_S)
        assert not alive, "a rank outlived its launcher"
