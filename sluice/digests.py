"""Digests of what the trainer gets: the orchestrator's journal and the trainer's record name the same trajectories by them."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from sluice.v1 import tokens_pb2


def trajectory_digest(trajectory: tokens_pb2.Trajectory) -> bytes:
    """Return the xxh3-128 of a trajectory's deterministic serialization, 16 bytes."""
    return xxhash.xxh3_128_digest(trajectory.SerializeToString(deterministic=True))


def batch_digest(digests: Iterable[bytes]) -> str:
    """Return the xxh3-128, hexadecimal, of the digests of a batch's trajectories one after the other, in the order of the batch."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))
