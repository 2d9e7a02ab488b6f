"""Sums over the processes that each train a share of the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["ALONE", "Ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The data-parallel ranks, as one of them sees them.

    Attributes:
        group: A CPU group of one process per data-parallel rank; None: this process is alone.
    """

    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of data-parallel ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def index(self) -> int:
        """This process's place among them."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over the ranks; of names that begin with ``max_`` the maximum. All ranks give the same names.

        Raises:
            RuntimeError: if a rank is gone or does not answer within the group's timeout.
        """
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
        """As `total`, of names that may differ between ranks: a rank that lacks one counts nothing for it.

        Raises:
            RuntimeError: if a rank is gone or does not answer within the group's timeout.
        """
        own = "\n".join([*values, ""]).encode()
        everyone = self.gather(torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else torch.empty(0).byte())
        names = set(bytes(everyone.tolist()).decode().split("\n")) - {""}
        return self.total({name: values.get(name, -math.inf if name.startswith("max_") else 0.0) for name in names})

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, those of rank 0 first; ranks may have different numbers of them.

        Args:
            rows: A CPU tensor; beyond the first dimension its shape and its dtype are the same on every rank.

        Raises:
            RuntimeError: if a rank is gone or does not answer within the group's timeout.
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


ALONE = Ranks()
"""One process that trains the whole batch."""
