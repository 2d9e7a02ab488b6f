"""Ranges of tensors: what is read, what is there."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.engine.coverage import METADATA_KEY, Coverage, CoverageError
from weightsync.engine.selection import (
    MOST_RANGES,
    fingerprint,
    intersection,
    missing,
    normal,
    region_ranges,
    total,
    union,
)

pieces = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def held_by(ranges) -> set[int]:
    return {number for begin, end in ranges for number in range(begin, end)}


@given(pieces)
def test_ranges_in_normal_form_hold_the_same(ranges):
    found = normal(ranges)
    assert held_by(found) == held_by(ranges)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(found))


@given(pieces, pieces)
def test_what_is_missing_is_needed_and_not_there(have, need):
    hole = missing(normal(have), normal(need))
    wanting = held_by(need) - held_by(have)
    assert (hole is None) == (not wanting)
    if hole is not None:
        assert hole[0] == min(wanting)
        assert set(range(*hole)) <= wanting


@given(pieces, pieces)
def test_an_intersection_holds_what_both_hold(one, other):
    found = intersection(normal(one), normal(other))
    assert held_by(found) == held_by(one) & held_by(other)
    assert found == normal(found)


def test_a_fingerprint_tells_selections_apart():
    names = [fingerprint(each) for each in ({}, {"w": ()}, {"w": ((0, 4),)}, {"v": ((0, 4),)})]
    assert len(set(names)) == 4
    assert fingerprint({"w": ((0, 4),), "v": ()}) == fingerprint({"v": (), "w": ((2, 4), (0, 2))})


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
    assert missing(found, tuple((1 + 4 * row, 3 + 4 * row) for row in range(rows))) is None


def test_together_two_ranks_read_everything():
    together = union([{"w": ((0, 8),), "b": ((0, 4),)}, {"w": ((8, 16),), "b": ((0, 4),)}])
    assert together == {"w": ((0, 16),), "b": ((0, 4),)}
    assert total(together["w"]) == 16
    assert union([{"w": ((0, 8),)}, {}]) == {}, "wanted whole by one, so whole"


def test_coverage_comes_back_from_a_header():
    coverage = Coverage({"w": ((0, 8), (16, 24)), "none": ()})
    assert Coverage.parse({"format": "pt"} | coverage.metadata()) == coverage
    assert Coverage.parse({"format": "pt"}).whole
    assert Coverage.parse(None).whole
    assert not Coverage().metadata()


@pytest.mark.parametrize("text", ["{", "[]", '{"w": 3}', '{"w": [[1]]}', '{"w": [["a", 2]]}'])
def test_coverage_that_cannot_be_read_is_not_taken_for_a_whole_file(text):
    with pytest.raises(CoverageError):
        Coverage.parse({METADATA_KEY: text})


def test_what_is_read_must_be_there():
    coverage = Coverage({"w": ((0, 8),), "unread": ()})
    coverage.check({"w": ((0, 8),), "unread": (), "other": ((0, 100),)})
    with pytest.raises(CoverageError, match="elements 8 to 12 of w"):
        coverage.check({"w": ((4, 12),), "unread": ()})
    with pytest.raises(CoverageError, match="w"):
        coverage.check({"unread": ()})
