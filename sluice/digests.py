"""Digests of trajectories and batches. The orchestrator's journal and the trainer's record both identify trajectories by them."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from sluice.v1 import tokens_pb2


def trajectory_digest(trajectory: tokens_pb2.Trajectory) -> bytes:
    """Return the xxh3-128 of a trajectory's deterministic serialization, 16 bytes."""
    return xxhash.xxh3_128_digest(trajectory.SerializeToString(deterministic=True))


def batch_digest(digests: Iterable[bytes]) -> str:
    """Return the xxh3-128, hexadecimal, of the concatenated digests of a batch's trajectories, in the order of the batch."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))
