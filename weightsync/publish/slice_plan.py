"""Which rank sends which slice: pure, and the same on every rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.dtypes import DTYPES
from weightsync.format.manifest import Box, box, check_manifest

__all__ = ["share_out", "total_bytes"]


def share_out(held: Sequence[pb.Shard]) -> list[set[tuple[str, Box]]]:
    """Give each slice to exactly one of the ranks that hold it.

    Slices that one rank alone holds are its own. What several hold (replicated DTensors, plain tensors) goes, largest
    first, to the holder that has least to send so far.

    Args:
        held: What each rank holds, by rank.

    Returns:
        For each rank the slices that it sends: name and place.

    Raises:
        ManifestError: if the slices of all ranks do not cover every tensor exactly.
    """
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    described: dict[tuple[str, Box], pb.TensorSlice] = {}
    for rank, shard in enumerate(held):
        for tensor in shard.tensors:
            key = (tensor.name, box(tensor))
            holders[key].append(rank)
            described[key] = tensor
    _check_cover(list(described.values()))
    sizes = {key: _size(described[key]) for key in described}
    order = sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key))
    load = [0] * len(held)
    shares: list[set[tuple[str, Box]]] = [set() for _ in held]
    for key in order:
        rank = min(holders[key], key=lambda rank: (load[rank], rank))
        shares[rank].add(key)
        load[rank] += sizes[key]
    return shares


def total_bytes(held: Sequence[pb.Shard]) -> int:
    """Dense size of the model: each slice once, however many ranks hold it."""
    sizes = {(tensor.name, box(tensor)): _size(tensor) for shard in held for tensor in shard.tensors}
    return sum(sizes.values())


def _size(tensor: pb.TensorSlice) -> int:
    return math.prod(box(tensor).sizes) * DTYPES[tensor.dtype].size


def _check_cover(tensors: Sequence[pb.TensorSlice]) -> None:
    shard = pb.Shard(name="all")
    for index, tensor in enumerate(tensors):
        shard.tensors.add().CopyFrom(tensor)
        shard.tensors[-1].entry = str(index)
    check_manifest(pb.Manifest(shards=[shard]))
