"""The trainer as a process: started from a file, killed, resumed, stopped."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import torch
from rank_programs import RankPrograms
from safetensors.torch import load_file
from trainer_programs import RUN, START_S, Programs, header, reached, ready, submit, train

from sluice.rpc import SluiceError
from sluice.supervise.restart_policy import EXIT_UNFINISHED
from sluice.v1 import tokens_pb2, trainer_pb2
from sluice.versions import Version
from trainer_svc.checkpoint.state import read_below

pytestmark = pytest.mark.slow


class Held:
    """A place at which a program stops for good."""

    def __init__(self, directory: Path, place: str, nth: int = 1) -> None:
        self.reached = directory / f"reached-{place.rpartition(':')[2]}"
        self.launcher = ("held_program", place, str(nth), str(self.reached))

    async def there(self) -> None:
        """Wait until the program is at the place."""
        async with asyncio.timeout(START_S):
            while not self.reached.exists():  # noqa: ASYNC110 - a file of another process
                await asyncio.sleep(0.01)


async def test_a_trainer_killed_in_a_checkpoint_and_in_a_step_ends_where_one_ends_that_was_not(
    tmp_path: Path, rank_programs: RankPrograms
) -> None:
    programs = Programs(tmp_path)
    checkpoints = tmp_path / "outputs" / RUN / "checkpoints"

    def written(name: str) -> dict[str, torch.Tensor]:
        exported = load_file(checkpoints / name / "hf" / "model.safetensors")
        return read_below("policy.", checkpoints / name / "state") | exported

    async with programs.program("weightsync"), programs.client() as client:
        saving = Held(tmp_path, "trainer_svc.checkpoint.saver:write_manifest", nth=3)
        async with programs.forked(rank_programs, "trainer", launcher=saving.launcher) as trainer:
            digest = (await ready(client, trainer)).tokenizer_digest
            await client.begin_epoch(RUN, 1)
            for number in (1, 2, 3):
                await train(client, number, 1, digest)
            await client.save_checkpoint(RUN)
            for number in (4, 5):
                await train(client, number, 1, digest)
            await client.save_checkpoint(RUN)
            uninterrupted = written("step_5")
            await client.begin_epoch(RUN, 2, checkpoint="step_3")
            await train(client, 4, 2, digest)
            asked = asyncio.create_task(client.save_checkpoint(RUN))
            await saving.there()
            await train(client, 5, 2, digest)  # while all but the manifest is on disk
            trainer.kill()
            with pytest.raises(SluiceError):
                await asked

        stepping = Held(tmp_path, "trainer_svc.engine.engine:TrainEngine.step", nth=2)
        async with programs.forked(rank_programs, "trainer", launcher=stepping.launcher) as trainer:
            await ready(client, trainer)
            begun = await client.begin_epoch(RUN, 3)
            assert Version.from_proto(begun.restored_version) == Version(1, 3), (
                "step_4 was not whole, step_5 left behind"
            )
            await train(client, 4, 3, digest)
            await submit(client, 5, 3, digest)
            await stepping.there()
            trainer.kill()

        async with programs.forked(rank_programs, "trainer") as trainer:
            await ready(client, trainer)
            begun = await client.begin_epoch(RUN, 4)
            assert Version.from_proto(begun.policy_version) == Version(4, 3)
            for number in (4, 5):
                await train(client, number, 4, digest)
            await client.save_checkpoint(RUN)
            resumed = written("step_5")
            assert resumed.keys() == uninterrupted.keys()
            assert all(torch.equal(resumed[name], tensor) for name, tensor in uninterrupted.items())
            assert not list(checkpoints.glob(".*")), "what the kill left behind is swept"
            trainer.send_signal(signal.SIGTERM)
            async with asyncio.timeout(START_S):
                assert await trainer.wait() == EXIT_UNFINISHED


async def test_a_signal_in_the_middle_of_a_long_step_ends_the_process_cleanly(
    tmp_path: Path, rank_programs: RankPrograms
) -> None:
    programs = Programs(tmp_path)
    programs.file.write_text(programs.file.read_text().replace("[trainer]", "[trainer]\n token_budget = 512"))
    async with (
        programs.program("weightsync"),
        programs.client() as client,
        programs.forked(rank_programs, "trainer") as trainer,
    ):
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
        async with asyncio.timeout(START_S):
            assert await trainer.wait() == EXIT_UNFINISHED
    log = (tmp_path / "trainer.log").read_text()
    assert "Traceback" not in log
    assert '"event": "step"' not in log, "it did not wait for the end of the step"


async def test_a_model_that_cannot_be_loaded_ends_the_process_with_the_reason(tmp_path: Path) -> None:
    programs = Programs(tmp_path)
    (tmp_path / "tiny" / "config.json").unlink()
    async with programs.program("trainer") as trainer:
        async with asyncio.timeout(START_S):
            assert await trainer.wait() == 2
    assert "config.json" in (tmp_path / "trainer.log").read_text()
