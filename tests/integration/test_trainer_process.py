"""The trainer as a process: started from a file, killed, resumed, stopped."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_programs import RUN, START_S, Programs, header, reached, ready, train

from sluice.v1 import tokens_pb2, trainer_pb2
from sluice.versions import Version

pytestmark = pytest.mark.slow


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
