"""How the processes of a context-parallel group share a packed row of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tiny_policy import ragged_batch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_svc.batch.rows import pack
from trainer_svc.parallel.context import Context

SIZE = 3


class Reads(TorchDispatchMode):
    """Notes operations for which the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal"):
            self.seen.append(name)
        return function(*arguments, **(options or {}))


@pytest.fixture(params=range(SIZE))
def context(request: pytest.FixtureRequest) -> Iterator[Context]:
    """One process of a group whose other processes never answer."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=SIZE)
    try:
        yield Context(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_slices_hold_every_loss_token_once_where_its_predictor_lies(context: Context) -> None:
    (batch,) = pack(ragged_batch(seed=3), 100_000)
    part, own = context.own_slice(batch)
    width, rank = context.width(batch), dist.get_rank()
    assert part.input_ids.shape == (1, width)
    assert own.tolist() == [place for place, at in enumerate(batch.predictors.tolist()) if at // width == rank]
    assert torch.equal(part.predictors + rank * width, batch.predictors[own])
    assert torch.equal(part.targets, batch.targets[own])
    assert part.predictor_places.tolist() == part.predictors.tolist()


def test_a_slice_is_cut_without_waiting_for_the_device(context: Context) -> None:
    (batch,) = pack(ragged_batch(seed=3), 100_000)
    with Reads() as reads:
        context.own_slice(batch)
    assert reads.seen == []
