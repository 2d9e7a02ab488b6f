"""Which process writes which part of which tensor: pure, and the same on every process."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from sluice.v1.weightsync_pb2 import Shard, TensorSlice
from trainer_svc.engine.local_part import local_part

__all__ = ["Piece", "held_pieces", "pieces_from_bytes", "pieces_to_bytes", "share_out"]


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """A box of a tensor.

    Attributes:
        name: The tensor's name.
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


def held_pieces(tensors: Mapping[str, torch.Tensor]) -> dict[Piece, torch.Tensor]:
    """What this process holds of each tensor, where it lies; an empty share is left out."""
    held: dict[Piece, torch.Tensor] = {}
    for name, tensor in tensors.items():
        local, offsets = local_part(tensor)
        if local.numel() or not tensor.numel():
            held[Piece(name, tuple(tensor.shape), offsets, tuple(local.shape))] = local
    return held


def share_out(held: Sequence[Collection[Piece]]) -> list[set[Piece]]:
    """Give each piece to exactly one of the processes that hold it: the one with least to write so far, largest pieces first.

    Args:
        held: What each process holds, by rank.

    Raises:
        ValueError: if together they do not hold every tensor whole, or pieces of one overlap.
    """
    holders: dict[Piece, list[int]] = defaultdict(list)
    for rank, pieces in enumerate(held):
        for piece in pieces:
            holders[piece].append(rank)
    _check_cover(holders)
    load = [0] * len(held)
    shares: list[set[Piece]] = [set() for _ in held]
    for piece in sorted(holders, key=lambda piece: (len(holders[piece]), -piece.elements, piece)):
        rank = min(holders[piece], key=lambda rank: (load[rank], rank))
        shares[rank].add(piece)
        load[rank] += piece.elements
    return shares


def _check_cover(pieces: Collection[Piece]) -> None:
    """Pieces are cells of a grid, as every layout of DTensors makes them, so that counting values suffices."""
    found: dict[str, int] = defaultdict(int)
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        found[piece.name] += piece.elements
        if shapes.setdefault(piece.name, piece.shape) != piece.shape:
            raise ValueError(
                f"{piece.name!r} has shape {piece.shape} on one rank and {shapes[piece.name]} on another: give every rank the same model"
            )
    for name, count in found.items():
        if count != math.prod(shapes[name]):
            raise ValueError(
                f"the ranks hold {count} of the {math.prod(shapes[name])} values of {name!r}: save on all ranks of one layout"
            )


def pieces_to_bytes(pieces: Collection[Piece]) -> bytes:
    """The wire form, between the ranks of one trainer."""
    return Shard(
        tensors=[
            TensorSlice(name=each.name, global_shape=each.shape, offsets=each.offsets, sizes=each.sizes)
            for each in sorted(pieces)
        ]
    ).SerializeToString()


def pieces_from_bytes(content: bytes) -> list[Piece]:
    """Read the wire form."""
    return [
        Piece(each.name, tuple(each.global_shape), tuple(each.offsets), tuple(each.sizes))
        for each in Shard.FromString(content).tensors
    ]
