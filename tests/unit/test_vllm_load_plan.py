"""What a loader reads is noted, whatever ways it takes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from weightsync.vllm.load_plan import MOST_RANGES, Copy, ReadRecorder, Region, normal, region_ranges


@pytest.fixture
def mapped(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(48.0).reshape(6, 8), "b": torch.arange(8).bfloat16()}, path)
    with safe_open(path, framework="pt") as file:
        yield {name: file.get_tensor(name) for name in ("a", "b")}


def recorded(tensors, load) -> ReadRecorder:
    recorder = ReadRecorder()
    given = dict(recorder.watch(tensors.items()))
    with recorder:
        load(given)
    assert not recorder.failure
    return recorder


def test_what_is_copied_by_slices_is_noted_by_slices(mapped):
    target = torch.empty(12, device="meta")

    def load(given):
        target[:8].copy_(given["a"].narrow(0, 2, 1)[0])
        target[8:].copy_(given["b"][4:])

    recorder = recorded(mapped, load)
    assert recorder.reads() == {"a": ((16, 24),), "b": ((4, 8),)}
    key = Copy.storage_key(target)
    assert [(copy.name, copy.storage, copy.target.offset) for copy in recorder.copies] == [("a", key, 0), ("b", key, 8)]


def test_columns_are_noted_row_by_row(mapped):
    recorder = recorded(mapped, lambda given: torch.empty(6, 4).copy_(given["a"].chunk(2, dim=1)[1]))
    assert recorder.reads()["a"] == tuple((8 * row + 4, 8 * row + 8) for row in range(6))


def test_a_transposed_read_is_noted(mapped):
    recorder = recorded(mapped, lambda given: torch.empty(8, 2).copy_(given["a"].t()[:, :2]))
    assert recorder.reads()["a"] == ((0, 16),)


@pytest.mark.parametrize(
    "read",
    [
        lambda a: a[1].to(torch.bfloat16),
        lambda a: a[1].clone(),
        lambda a: torch.cat([a[1], a[1]]),
        lambda a: a[1].sum().item(),
        lambda a: a[1].exp(),
        lambda a: a[1].view(torch.int16)[1:].clone(),
        lambda a: torch.empty(8).add_(a[1]),
        lambda a: torch.empty(8).copy_(a.as_strided((8,), (1,), a.storage_offset() + 8)),
    ],
)
def test_every_way_to_read_counts(mapped, read):
    assert recorded(mapped, lambda given: read(given["a"])).reads() == {"a": ((8, 16),), "b": ()}


def test_looking_at_a_tensor_and_reading_others_reads_nothing_of_it(mapped):
    def load(given):
        assert given["b"].unsqueeze(0).t()[2:].shape == (6, 1)
        torch.empty(8).copy_(mapped["a"][0])

    assert recorded({"b": mapped["b"]}, load).reads() == {"b": ()}


def test_a_copy_can_be_done_again_from_its_description(mapped):
    target = torch.zeros(4, 6)
    recorder = recorded(mapped, lambda given: target[1:3].copy_(given["a"].narrow(1, 4, 2).t()))
    (copy,) = recorder.copies
    again = torch.zeros(4, 6)
    copy.target.of(again).copy_(copy.source.of(mapped["a"]))
    assert again.equal(target)
    assert Region(0, (2, 2), (2, 1)).of(torch.arange(8.0)[4:]).tolist() == [[4, 5], [6, 7]]


pieces = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def held_by(ranges) -> set[int]:
    return {number for begin, end in ranges for number in range(begin, end)}


@given(pieces)
def test_ranges_in_normal_form_hold_the_same(ranges):
    found = normal(ranges)
    assert held_by(found) == held_by(ranges)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(found))


def test_ranges_that_lie_near_each_other_are_joined_when_asked_for():
    assert normal([(0, 4), (8, 12), (100, 110)], gap=4) == ((0, 12), (100, 110))


@given(st.data())
def test_a_region_is_described_by_exactly_its_elements(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    elements = np.arange(math.prod(shape)).reshape(shape)
    begins = [data.draw(st.integers(0, size)) for size in shape]
    part = elements[tuple(slice(b, data.draw(st.integers(b, s))) for b, s in zip(begins, shape, strict=True))]
    part = part.transpose(data.draw(st.permutations(range(part.ndim))))
    strides = [stride // elements.itemsize for stride in part.strides]
    offset = int(part.flat[0]) if part.size else 0
    found = region_ranges(offset, part.shape, strides)
    assert held_by(found) == {int(element) for element in part.flat}


def test_the_columns_of_a_rank_are_one_range_per_row():
    assert region_ranges(2, (3, 2), (4, 1)) == ((2, 4), (6, 8), (10, 12))


def test_the_rows_of_a_rank_are_one_range():
    assert region_ranges(8, (2, 4), (4, 1)) == ((8, 16),)


def test_a_read_in_too_many_pieces_is_described_by_fewer_that_hold_it():
    rows = MOST_RANGES + 1
    found = region_ranges(1, (rows, 2), (4, 1))
    assert len(found) <= MOST_RANGES
    assert {1 + 4 * row + column for row in range(rows) for column in range(2)} <= held_by(found)
