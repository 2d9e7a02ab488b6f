"""What a checkpoint on schedule does when the compute thread does not come to it in time."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lone_link import lone_link

from sluice.config import CommonConfig
from sluice.rpc import SluiceError
from trainer_svc.config import TrainerConfig
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.learner import Learner
from trainer_svc.service.rank_group import RankGroup
from trainer_svc.service.trainer import CheckpointWriter


@pytest.fixture
async def busy() -> AsyncIterator[ComputeThread]:
    """A compute thread in a step that does not end."""
    release = threading.Event()
    compute = ComputeThread()
    with pytest.raises(SluiceError):
        await compute.run(release.wait, deadline_s=1.0, what="a step")
    yield compute
    release.set()
    await compute.stop(60.0)


def writer(output_dir: Path, compute: ComputeThread, ranks: RankGroup | None) -> CheckpointWriter:
    config = TrainerConfig(deadlines={"step_s": 1.0, "save_s": 1.0})
    learner = Learner(CommonConfig(run="test", output_dir=output_dir, model="none"), config, ranks=ranks)
    return CheckpointWriter(learner, compute)


@pytest.mark.slow
async def test_one_process_notes_it_and_goes_on(tmp_path: Path, busy: ComputeThread) -> None:
    alone = writer(tmp_path, busy, None)
    await alone.begin_scheduled()
    assert "copying the state for a checkpoint took longer" in alone.last_error


@pytest.mark.slow
async def test_several_ranks_end_since_none_knows_how_far_the_others_are(tmp_path: Path, busy: ComputeThread) -> None:
    with lone_link() as link:
        several = writer(tmp_path, busy, RankGroup(link))
        with pytest.raises(SluiceError, match="copying the state for a checkpoint took longer") as refused:
            await several.begin_scheduled()
    assert refused.value.reason == "COMPUTE_DEADLINE"
