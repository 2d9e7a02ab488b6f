"""The ranks of a trainer share the slices of their model out among themselves, once."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.manifest import ManifestError, box, check_sendable
from weightsync.publish.group_commit import Frame, Ranks, first_failure
from weightsync.publish.slice_plan import share_out, total_bytes
from weightsync.publish.slices import LocalSlice, to_proto

__all__ = ["PLAN", "agree_on_shares"]

PLAN = "plan"
"""Name of the exchange in which ranks learn who holds what."""


def agree_on_shares(ranks: Ranks, layout: Sequence[LocalSlice], deadline: float) -> tuple[list[LocalSlice], int]:
    """Tell the other ranks what this one holds, and find what it sends. Blocking.

    Args:
        ranks: Who publishes the model.
        layout: What this rank holds.
        deadline: Time of `time.monotonic` at which to give up.

    Returns:
        The slices that this rank sends, and the dense size of the whole model in bytes.

    Raises:
        SluiceError: what any rank failed with.
        ValueError: if the slices of all ranks do not make up a model; on every rank.
    """
    described = to_proto(layout, "held")
    frames = ranks.exchange(PLAN, Frame(described.SerializeToString()), deadline)
    failure = first_failure(frames)
    if failure is not None:
        raise failure
    held = [pb.Shard.FromString(frame.payload) for frame in frames]
    try:
        check_sendable(held)
        mine = share_out(held)[ranks.rank]
    except ManifestError as error:
        raise ValueError(f"the ranks' slices do not make up a version: {error}") from error
    pairs = zip(described.tensors, layout, strict=True)
    return [row for tensor, row in pairs if (tensor.name, box(tensor)) in mine], total_bytes(held)
