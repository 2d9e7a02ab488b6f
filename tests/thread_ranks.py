"""Ranks as threads: each has a share of the batch, and they meet wherever a sum or a gathering needs them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import torch
from simulated_clock import LIMIT_S

__all__ = ["Meeting", "ThreadRanks", "on_ranks"]


@dataclass
class Meeting:
    size: int
    barrier: Barrier
    brought: dict[int, object] = field(default_factory=dict)

    @classmethod
    def of(cls, size: int) -> Meeting:
        return cls(size, Barrier(size))

    def exchange(self, index: int, value: object) -> list:
        self.brought[index] = value
        self.barrier.wait(LIMIT_S)
        everything = [self.brought[rank] for rank in range(self.size)]
        self.barrier.wait(LIMIT_S)
        return everything


@dataclass
class ThreadRanks:
    """What `trainer_svc.parallel.mesh.Ranks` offers, between threads."""

    meeting: Meeting
    index: int

    @property
    def size(self) -> int:
        return self.meeting.size

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        shares = self.meeting.exchange(self.index, dict(values))
        return {name: (max if name.startswith("max_") else sum)(share[name] for share in shares) for name in values}

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.index, rows))

    def exchange(self, content: bytes) -> list[bytes]:
        return self.meeting.exchange(self.index, content)


def on_ranks(shares: list, work: Callable) -> list:
    """`work(share, ranks)` of each share, all at once, each on a rank of its own; the results in the same order."""
    meeting = Meeting.of(len(shares))
    with ThreadPoolExecutor(len(shares)) as pool:
        futures = [pool.submit(work, share, ThreadRanks(meeting, index)) for index, share in enumerate(shares)]
        return [future.result(2 * LIMIT_S) for future in futures]
