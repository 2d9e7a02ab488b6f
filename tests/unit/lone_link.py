"""The link of a rank 0 that leads nobody: a real store and a real group, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from trainer_svc.compute_config import ParallelDims
from trainer_svc.parallel.mesh import ALONE, Mesh
from trainer_svc.service.rank_group import RankLink

TIMEOUT_S = 60.0


@contextmanager
def lone_link() -> Iterator[RankLink]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        try:
            yield RankLink(Mesh(ParallelDims(), 0, None, ALONE, everyone=dist.group.WORLD), TIMEOUT_S)
        finally:
            dist.destroy_process_group()
