"""What a checkpoint on schedule does when the compute thread does not come to it in time."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from sluice.config import CommonConfig
from sluice.rpc import SluiceError
from trainer_svc.config import TrainerConfig
from trainer_svc.parallel.dims import ParallelDims
from trainer_svc.parallel.mesh import Mesh
from trainer_svc.parallel.ranks import ALONE
from trainer_svc.service.batch_files import BatchFiles
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.crew import Crew
from trainer_svc.service.crew_link import CrewLink
from trainer_svc.service.learner import Learner
from trainer_svc.service.saving import Saving


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[CrewLink]:
    """That of a rank 0 that leads nobody: enough for its crew to count as several."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield CrewLink(Mesh(ParallelDims(), 0, None, ALONE, everyone=dist.group.WORLD), 60.0)
    dist.destroy_process_group()


@pytest.fixture
async def busy() -> AsyncIterator[ComputeThread]:
    """A compute thread in a step that does not end."""
    release = threading.Event()
    compute = ComputeThread()
    with pytest.raises(SluiceError):
        await compute.run(release.wait, deadline_s=0.01, what="a step")
    yield compute
    release.set()
    await compute.stop(60.0)


def saving(output_dir: Path, compute: ComputeThread, crew: Crew) -> Saving:
    config = TrainerConfig(deadlines={"step_s": 0.01, "save_s": 0.01})
    learner = Learner(CommonConfig(run="test", output_dir=output_dir, model="none"), config, crew=crew)
    return Saving(learner, compute, BatchFiles(output_dir / "batches"), config)


async def test_one_process_notes_it_and_goes_on(tmp_path: Path, busy: ComputeThread) -> None:
    alone = saving(tmp_path, busy, Crew())
    await alone.begin_or_log()
    assert "copying the state for a checkpoint took longer" in alone.last_error


async def test_several_ranks_end_since_none_knows_how_far_the_others_are(
    tmp_path: Path, busy: ComputeThread, link: CrewLink
) -> None:
    with pytest.raises(SluiceError, match="copying the state for a checkpoint took longer") as refused:
        await saving(tmp_path, busy, Crew(link)).begin_or_log()
    assert refused.value.reason == "COMPUTE_DEADLINE"
