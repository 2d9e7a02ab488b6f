"""Which parts of which tensors an engine's process reads: ranges and what can be done with them. Pure.

Ranges are pairs (begin, end), sorted, disjoint and not touching each other; every function takes them in any order and gives
them in that form. Those of a `Selection` count a tensor's elements in the order in which safetensors lays them out, not its
bytes: weights are published in other types than the engine computes with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import xxhash

__all__ = [
    "MOST_RANGES",
    "Ranges",
    "Selection",
    "fingerprint",
    "intersection",
    "missing",
    "normal",
    "region_ranges",
    "scaled",
    "shifted",
    "total",
    "union",
]

Ranges = tuple[tuple[int, int], ...]

Selection = Mapping[str, Ranges]
"""Ranges by tensor name. A name that is not in it is wanted whole; one with no ranges is not wanted at all."""

MOST_RANGES = 4096
"""Most ranges that one read of a tensor is described by; a read in more pieces is described by fewer, larger ones."""


def normal(ranges: Iterable[tuple[int, int]], gap: int = 0) -> Ranges:
    """Sort and join ranges.

    Args:
        ranges: In any order, possibly overlapping or empty.
        gap: Ranges that are at most so many bytes apart become one, with what lies between.
    """
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if begin >= end:
            continue
        if joined and begin <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return tuple(joined)


def total(ranges: Ranges) -> int:
    """How much they hold."""
    return sum(end - begin for begin, end in ranges)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """What lies in both."""
    common: list[tuple[int, int]] = []
    others = normal(other)
    first = 0
    for begin, end in normal(one):
        while first < len(others) and others[first][1] <= begin:
            first += 1
        for low, high in others[first:]:
            if low >= end:
                break
            common.append((max(begin, low), min(end, high)))
    return normal(common)


def shifted(ranges: Ranges, by: int) -> Ranges:
    """The ranges, each so much later."""
    return tuple((begin + by, end + by) for begin, end in ranges)


def scaled(ranges: Ranges, by: int) -> Ranges:
    """Ranges of elements in bytes, where an element has so many."""
    return tuple((begin * by, end * by) for begin, end in ranges)


def missing(have: Ranges, need: Ranges) -> tuple[int, int] | None:
    """The first range of ``need``, or part of it, that ``have`` does not cover; None if it covers all."""
    have = normal(have)
    position = 0
    for begin, end in normal(need):
        while position < len(have) and have[position][1] <= begin:
            position += 1
        there = position < len(have) and have[position][0] <= begin
        first = have[position][1] if there else begin
        if first < end:
            after = position + there
            return first, min(end, have[after][0]) if after < len(have) else end
    return None


def union(selections: Iterable[Selection]) -> dict[str, Ranges]:
    """What at least one of several processes reads; whole where one of them names no ranges."""
    every = list(selections)
    names = set.intersection(*(set(each) for each in every)) if every else set()
    return {name: normal(piece for each in every for piece in each[name]) for name in sorted(names)}


def fingerprint(selection: Selection) -> str:
    """A short name that other selections do not have; hexadecimal."""
    lines = "\n".join(f"{name} {normal(ranges)}" for name, ranges in sorted(selection.items()))
    return xxhash.xxh3_64(lines.encode()).hexdigest()


def region_ranges(offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Ranges:
    """Elements of a strided region, such as the columns of one tensor-parallel rank.

    Args:
        offset: First element, counted from the tensor's first.
        sizes: Extent per dimension.
        strides: Elements from one index to the next per dimension; not negative.

    Returns:
        At most `MOST_RANGES` ranges; with gaps in them where there would be more.
    """
    if math.prod(sizes) == 0:
        return ()
    run = 1  # elements from the first to the last of what is described so far
    outer: list[tuple[int, int]] = []  # (size, stride) of the dimensions outside of it, innermost first
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
        if outer or stride > run:
            outer.append((size, stride))
        else:
            run += (size - 1) * stride
    while math.prod(size for size, _ in outer) > MOST_RANGES:
        size, stride = outer.pop(0)
        run += (size - 1) * stride
    begins = [offset]
    for size, stride in outer:
        begins = [begin + index * stride for begin in begins for index in range(size)]
    return normal((begin, begin + run) for begin in begins)
