"""What publishing a version cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["PushReport"]


@dataclass(frozen=True, slots=True)
class PushReport:
    """What publishing a version cost; of several ranks, sums of bytes and the slowest one's seconds.

    Attributes:
        bytes_sent: Bytes of the shards that were handed over, those of repeats included; 0 if the service had the version.
        push_s: Seconds until the service held every byte on disk.
        commit_s: Seconds that the commit took.
        digest: The version's digest.
        duplicate: Whether the version was committed before.
        kind: Whether whole tensors travelled, or the difference from the version before.
        dense_bytes: Bytes of a dense copy.
        diff_s: Seconds of comparing and encoding.
        changed_fraction: Values that differ from the version before, of those compared; 1 if none were.
    """

    bytes_sent: int
    push_s: float
    commit_s: float
    digest: str
    duplicate: bool
    kind: Literal["anchor", "delta"] = "anchor"
    dense_bytes: int = 0
    diff_s: float = 0.0
    changed_fraction: float = 1.0
