"""The processes that write one checkpoint: each does its part, and all of them learn whether every part was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from trainer_svc.parallel.mesh import Mesh

__all__ = ["ALONE", "PartFailedError", "Writers"]

DONE, FAILED = b"\x01", b"\x00"


class PartFailedError(OSError):
    """Another process could not do its part."""


@dataclass(frozen=True, slots=True)
class Writers:
    """All processes of a trainer, as one of them sees them.

    Attributes:
        group: A CPU group that nothing else uses, since checkpoints are written beside training; None: this process is alone.
    """

    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: Mesh, timeout_s: float) -> Self:
        """The processes of a mesh; all of them call it at the same time.

        Args:
            mesh: The processes.
            timeout_s: Seconds that one may wait for the others, who write meanwhile.
        """
        if mesh.dims.world_size == 1:
            return cls()
        return cls(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))

    @property
    def size(self) -> int:
        """Number of processes."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def index(self) -> int:
        """This process's place among them; 0 writes the manifest."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def agree(self, part: Callable[[], bytes]) -> list[bytes]:
        """Do this process's part, and wait for the others.

        Args:
            part: Does it; what it returns goes to every process.

        Returns:
            What the parts returned, by process.

        Raises:
            PartFailedError: if another process failed. What fails here is raised as it is, after the others know.
            RuntimeError: if a process is gone or does not answer within the group's timeout.
        """
        if self.group is None:
            return [part()]
        try:
            own, failure = DONE + part(), None
        except Exception as error:  # noqa: BLE001  raised below
            own, failure = FAILED + f"{type(error).__name__}: {error}".encode(), error
        answers = self._gather(own)
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if answer.startswith(FAILED):
                raise PartFailedError(f"rank {rank} failed: {answer[1:].decode(errors='replace')}")
        return [answer[1:] for answer in answers]

    def _gather(self, own: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(own)]), group=self.group)
        longest = max(int(each) for each in lengths)
        padded = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8)
        answers = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(answers, padded, group=self.group)
        pairs = zip(answers, lengths, strict=True)
        return [answer.numpy().tobytes()[: int(length)] for answer, length in pairs]


ALONE = Writers()
"""One process that writes all of it."""
