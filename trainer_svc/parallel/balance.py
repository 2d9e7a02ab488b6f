"""Which rows each data-parallel rank gets, so that all of them have about as much to do. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Rows

from trainer_svc.engine.batch import Sequence

__all__ = ["balance"]


def balance(rows: Rows[Sequence], shares: int) -> list[list[int]]:
    """Deal rows out, the longest first, each to the share that has the fewest tokens.

    Args:
        rows: Any number of rows.
        shares: Number of shares, at least 1.

    Returns:
        Places of the rows in each share, ascending; the same rows give the same shares.
    """
    if shares < 1:
        raise ValueError(f"rows cannot be dealt out to {shares} ranks: give 1 or more")
    dealt: list[list[int]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for place in sorted(range(len(rows)), key=lambda place: -len(rows[place])):
        tokens, share = heapq.heappop(loads)
        dealt[share].append(place)
        heapq.heappush(loads, (tokens + len(rows[place]), share))
    return [sorted(places) for places in dealt]
