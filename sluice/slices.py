"""Slices of tensors, as the ranks of a trainer hold them, and which rank sends or writes which of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from sluice.v1 import weightsync_pb2


@dataclass(frozen=True, slots=True, order=True)
class TensorSlice:
    """A box of a tensor, as one rank holds it.

    Attributes:
        shape: Shape of the whole tensor.
        offsets: Where the box begins, per dimension.
        sizes: Its extent, per dimension.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.sizes)

    @classmethod
    def from_proto(cls, message: weightsync_pb2.TensorSlice) -> Self:
        """Read the wire form, which leaves offsets and sizes of whole tensors out."""
        shape = tuple(message.global_shape)
        return cls(message.name, shape, tuple(message.offsets) or (0,) * len(shape), tuple(message.sizes) or shape)

    def to_proto(self) -> weightsync_pb2.TensorSlice:
        """Write the wire form."""
        return weightsync_pb2.TensorSlice(
            name=self.name, global_shape=self.shape, offsets=self.offsets, sizes=self.sizes
        )


def assign_slices(held: Sequence[Mapping[TensorSlice, int]]) -> list[set[TensorSlice]]:
    """Assign each slice to one of the ranks that hold it. The same on every rank.

    A slice with one holder is assigned to that rank. Slices with several holders (replicated DTensors, plain tensors) are assigned,
    largest first, to the holder with the smallest total so far.

    Args:
        held: What each rank holds, by rank, with sizes in any unit.
    """
    holders: dict[TensorSlice, list[int]] = defaultdict(list)
    sizes: dict[TensorSlice, int] = {}
    for rank, slices in enumerate(held):
        for slice_, size in slices.items():
            holders[slice_].append(rank)
            sizes[slice_] = size
    load = [0] * len(held)
    assigned: list[set[TensorSlice]] = [set() for _ in held]
    for slice_ in sorted(holders, key=lambda slice_: (len(holders[slice_]) > 1, -sizes[slice_], slice_)):
        rank = min(holders[slice_], key=lambda rank: (load[rank], rank))
        assigned[rank].add(slice_)
        load[rank] += sizes[slice_]
    return assigned
