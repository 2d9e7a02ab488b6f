"""The axes of a trainer's processes: every rank has one place, and every share of a batch its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_svc.compute_config import MESH_AXES, ParallelConfig, ParallelDims

few = st.integers(1, 3)
meshes = st.builds(ParallelDims, few, few, few, few, few)


@given(meshes)
def test_every_rank_has_a_place_of_its_own_and_every_share_as_many_ranks(dims: ParallelDims) -> None:
    places = [dims.place(rank) for rank in range(dims.world_size)]
    assert len({tuple(place.items()) for place in places}) == dims.world_size
    assert all(0 <= place[axis] < getattr(dims, axis) for place in places for axis in MESH_AXES)
    shares = [list(dims.ranks_of(share)) for share in range(dims.data_parallel)]
    assert sorted(rank for share in shares for rank in share) == list(range(dims.world_size))
    assert {len(share) for share in shares} == {dims.tp * dims.cp * dims.pp}


def test_tensor_parallel_ranks_lie_beside_each_other_and_stages_apart() -> None:
    dims = ParallelDims(dp_shard=2, tp=2, pp=2)
    assert [dims.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert str(dims) == "pp 2 x dp_shard 2 x tp 2"


@given(meshes)
def test_the_rest_goes_to_shards(dims: ParallelDims) -> None:
    config = ParallelConfig(dp_replicate=dims.dp_replicate, tp=dims.tp, cp=dims.cp, pp=dims.pp)
    assert ParallelDims.of(config, dims.world_size) == dims


@pytest.mark.parametrize(
    ("sizes", "world_size", "told"),
    [
        ({"tp": 2}, 3, "3 processes are not a multiple of dp_replicate x tp x cp x pp = 2"),
        ({"dp_shard": 2}, 4, "makes 2 processes, but there are 4"),
        ({"tp": 2, "pp": 2, "dp_shard": 1}, 1, "start that many"),
    ],
)
def test_axes_that_do_not_make_up_the_processes_are_refused(sizes: dict[str, int], world_size: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ParallelDims.of(ParallelConfig(**sizes), world_size)
