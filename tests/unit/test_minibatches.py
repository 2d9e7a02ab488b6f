"""Minibatches hold whole groups, are about equal, and do not depend on how sequences lie on ranks."""

from __future__ import annotations

import threading

import torch.distributed as dist
from tiny_policy import ragged_batch, row

from trainer_svc.parallel.mesh import Ranks
from trainer_svc.update.policy import split_by_group


def split(rows, *args, **options) -> list[list]:
    """The rows of each minibatch."""
    return [[rows[place] for place in part] for part in split_by_group(rows, *args, **options)]


def names(parts) -> list[set[str]]:
    return [{each.trajectory_id for each in part} for part in parts]


def test_groups_stay_whole_and_every_sequence_is_in_one_minibatch():
    rows = ragged_batch(seed=1, groups=9)
    parts = split(rows, 3, seed="a")
    assert sorted(each.trajectory_id for part in parts for each in part) == sorted(each.trajectory_id for each in rows)
    homes = [{each.group_id for each in part} for part in parts]
    assert sum(map(len, homes)) == len({each.group_id for each in rows})


def test_equal_groups_make_equal_minibatches_in_an_order_that_the_seed_draws():
    rows = [row([5, 6], [7, 8, 9], group=f"g{i}", name=f"g{i}/{j}") for i in range(8) for j in range(2)]
    parts = split(rows, 4, seed="epoch 0")
    assert [len(part) for part in parts] == [4] * 4
    assert names(parts) == names(split(rows[::-1], 4, seed="epoch 0"))
    assert names(parts) != names(split(rows, 4, seed="epoch 1"))


def test_the_largest_minibatch_is_ahead_by_one_group_at_most():
    rows = ragged_batch(seed=2, groups=12)
    sizes = [sum(int(each.loss_mask.sum()) for each in part) for part in split(rows, 3, seed="x")]
    largest = max(
        sum(int(each.loss_mask.sum()) for each in rows if each.group_id == group)
        for group in {each.group_id for each in rows}
    )
    assert max(sizes) - min(sizes) <= largest


def test_fewer_groups_than_minibatches_make_fewer_minibatches():
    rows = [row([5], [6, 7], group="g", name="a"), row([5], [8], group="g", name="b")]
    assert names(split(rows, 4, seed="x")) == [{"a", "b"}]
    assert split([], 4, seed="x") == [[]]


def test_sequences_without_a_group_stand_alone():
    rows = [row([5], [6], name="a"), row([5], [6], name="b"), row([5], [7], name="")]
    assert sorted(map(len, split(rows, 3, seed="x"))) == [1, 1, 1]


def test_two_ranks_cut_as_one_does_though_their_groups_are_torn(tmp_path):
    rows = ragged_batch(seed=3, groups=7)
    whole = names(split(rows, 3, seed="x"))
    store = dist.FileStore(str(tmp_path / "store"), 2)
    found: dict[int, list[set[str]]] = {}

    def cut(index: int) -> None:
        group = dist.ProcessGroupGloo(store, index, 2)
        found[index] = names(split(rows[index::2], 3, seed="x", ranks=Ranks(group)))

    threads = [threading.Thread(target=cut, args=(index,)) for index in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert [a | b for a, b in zip(found[0], found[1], strict=True)] == whole
