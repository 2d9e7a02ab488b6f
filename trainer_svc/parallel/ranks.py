"""Ranks that exchange numbers and bytes, and `agree`, which makes all ranks fail if one fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """A group of ranks, seen from one of them.

    Every rank makes the same calls. All raise RuntimeError if a rank has died or does not answer within the group's timeout.

    Attributes:
        group: A CPU group with one process per rank; None: a single process.
    """

    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def index(self) -> int:
        """This process's place among the ranks."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sums over the ranks; for names that begin with ``max_`` the maximum. All ranks give the same names."""
        if self.group is None:
            return dict(values)
        names = sorted(values)
        sums = torch.tensor([values[name] for name in names], dtype=torch.float64)
        largest = sums.clone()
        dist.all_reduce(sums, group=self.group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        chosen = (largest if name.startswith("max_") else sums for name in names)
        return {name: float(each[place]) for place, (name, each) in enumerate(zip(names, chosen, strict=True))}

    def combine(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return `total` for names that may differ between ranks; a rank without a name contributes nothing to it."""
        names = {
            name for answer in self.exchange("\n".join(values).encode()) for name in answer.decode().split("\n") if name
        }
        return self.total({name: values.get(name, -math.inf if name.startswith("max_") else 0.0) for name in names})

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, in the order of ranks. Ranks may have different numbers of rows.

        Args:
            rows: A CPU tensor of the same dtype, and the same shape but for the first dimension, on every rank.
        """
        if self.group is None:
            return rows
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(rows)]), group=self.group)
        padded = rows.new_zeros((max(int(count) for count in counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])

    def exchange(self, content: bytes) -> list[bytes]:
        """Return the content of every rank, by rank."""
        if self.group is None:
            return [content]
        lengths = self.gather(torch.tensor([len(content)])).tolist()
        given = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        )
        return [part.numpy().tobytes() for part in self.gather(given).split(lengths)]


ALONE = Ranks()
"""A single process, which trains the whole batch."""


class OtherRankError(RuntimeError):
    """Another rank raised in the work that this rank finished; the message names that rank and quotes its error."""


class OtherRankRefusedError(OtherRankError, ValueError):
    """Another rank raised ValueError, so this rank raises one too: callers then treat the failure alike on every rank."""


def agree(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on every rank. If one rank raises, all ranks raise, so that none blocks in the next all-reduce.

    `work` must not communicate with the other ranks.

    Raises:
        Exception: what `work` raised on this rank.
        OtherRankRefusedError: if another rank raised ValueError (the first one that raised anything is named).
        OtherRankError: if another rank raised any other exception.
        RuntimeError: if a rank has died or does not answer within the group's timeout.
    """
    if ranks.size == 1:
        return work()
    try:
        result = work()
    except Exception as error:
        refused = isinstance(error, ValueError)
        ranks.exchange((b"refused:" if refused else b"failed:") + f"{type(error).__name__}: {error}".encode())
        raise
    for rank, answer in enumerate(ranks.exchange(b"")):
        kind, _, reason = answer.partition(b":")
        if kind:
            failure = OtherRankRefusedError if kind == b"refused" else OtherRankError
            raise failure(f"rank {rank} raised {reason.decode(errors='replace')}")
    return result
