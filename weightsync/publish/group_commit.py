"""How the ranks of a trainer agree on a version: each says what it has, all hear all of it. No weights travel here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import grpc
import torch
import torch.distributed as dist
import xxhash
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from sluice.rpc import SluiceError

__all__ = ["Frame", "Ranks", "first_failure"]

_CODES = {code.value[0]: code for code in grpc.StatusCode}

_MOST_FRAME_BYTES = 256 << 20
"""Longest frame that is taken: descriptions of about two million slices."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What one rank says: a message, or why it cannot go on."""

    payload: bytes = b""
    failure: SluiceError | None = None

    def to_wire(self) -> tuple[int, bytes]:
        """Status code (0 is OK) and bytes."""
        if self.failure is None:
            return 0, self.payload
        return self.failure.code.value[0], self.failure.to_status().SerializeToString()

    @classmethod
    def from_wire(cls, code: int, data: bytes) -> Frame:
        """Rebuild what `to_wire` gave."""
        if not code:
            return cls(payload=data)
        status, info = Status(), ErrorInfo()
        try:
            status.ParseFromString(data)
        except DecodeError:
            status.message = "a rank failed and sent no readable reason"
        for detail in status.details:
            detail.Unpack(info)
        known = _CODES.get(code, grpc.StatusCode.UNKNOWN)
        return cls(failure=SluiceError(known, info.reason or known.name, status.message, metadata=dict(info.metadata)))


class Ranks:
    """The ranks that publish one model together.

    Every exchange is a collective operation: all ranks call it, in the same order, and each hears of a failure of any
    other. Nothing is pickled; frames are protobuf messages in uint8 tensors.

    Args:
        group: A process group of CPU tensors (gloo) that nothing else uses, since operations of two threads on one group
            would cross; None: this process is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._out_of_step = False
        self.rank = 0 if group is None else dist.get_rank(group)
        self.count = 1 if group is None else dist.get_world_size(group)

    def exchange(self, step: str, frame: Frame, deadline: float) -> list[Frame]:
        """Say something and hear every rank, in the order of the ranks. Blocking.

        Args:
            step: What the exchange is about; ranks that are at different steps (one was interrupted) must not mistake
                each other's frames.
            frame: What this rank says.
            deadline: Time of `time.monotonic` at which to give up.

        Raises:
            SluiceError: FAILED_PRECONDITION RANK_LOST if a rank is gone, silent beyond the deadline or at another step. The
                group is of no use afterwards.
        """
        if self._group is None:
            return [frame]
        if self._out_of_step:
            raise _gone("an earlier exchange was not finished")
        self._out_of_step = True
        code, data = frame.to_wire()
        mark = xxhash.xxh3_64_intdigest(step.encode()) >> 1  # into the range of int64
        lengths = self._all_gather(torch.tensor([code, len(data), mark], dtype=torch.int64), deadline)
        if any(int(each[2]) != mark for each in lengths):
            raise _gone(f"they are at different steps, this one at {step!r}")
        sizes = [int(each[1]) for each in lengths]
        longest = max(sizes)
        if longest > _MOST_FRAME_BYTES:
            raise SluiceError.invalid_argument("tensors", f"a rank describes its slices in {longest} bytes: too many")
        padded = torch.zeros(max(1, longest), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        frames = self._all_gather(padded, deadline)
        self._out_of_step = False
        return [
            Frame.from_wire(int(length[0]), each[:size].numpy().tobytes())
            for length, size, each in zip(lengths, sizes, frames, strict=True)
        ]

    def _all_gather(self, tensor: torch.Tensor, deadline: float) -> list[torch.Tensor]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise _gone("no time is left")
        received = [torch.empty_like(tensor) for _ in range(self.count)]
        try:
            work = dist.all_gather(received, tensor, group=self._group, async_op=True)
            work.wait(timedelta(seconds=remaining))
        except RuntimeError as error:  # what torch.distributed raises for a lost peer and for a timeout
            raise _gone(str(error).partition("\n")[0]) from error
        return received


def first_failure(frames: Sequence[Frame]) -> SluiceError | None:
    """Why the ranks cannot go on, None if none failed; of several failures the one of the lowest rank."""
    for rank, frame in enumerate(frames):
        if frame.failure is not None:
            if len(frames) == 1:
                return frame.failure
            error = frame.failure
            return SluiceError(error.code, error.reason, f"rank {rank}: {error.message}", metadata=error.metadata)
    return None


def _gone(why: str) -> SluiceError:
    return SluiceError.failed_precondition(
        "RANK_LOST",
        f"the trainer's ranks cannot agree on a version ({why}); nothing was committed by this rank:"
        " start the ranks again with a new process group",
    )
