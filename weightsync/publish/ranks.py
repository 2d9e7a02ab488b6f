"""How several ranks of a trainer publish together: they exchange messages, and each slice is sent by one of them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeAlias

import grpc
import torch
import torch.distributed as dist
import xxhash
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from sluice.rpc import SluiceError
from sluice.rpc.errors import CODES
from sluice.slices import TensorSlice, assign_slices
from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.manifest import box, check_manifest
from weightsync.format.safetensors import DTYPES

_MOST_ANSWER_BYTES = 256 << 20
"""Longest answer that is taken: descriptions of about two million slices."""


Answer: TypeAlias = bytes | SluiceError
"""What one rank says: a message, or why it cannot continue."""


def to_wire(answer: Answer) -> tuple[int, bytes]:
    """Return a status code (0 is OK) and bytes."""
    if isinstance(answer, bytes):
        return 0, answer
    return answer.code.value[0], answer.to_status().SerializeToString()


def from_wire(code: int, data: bytes) -> Answer:
    """Rebuild what `to_wire` returned."""
    if not code:
        return data
    status = Status()
    try:
        status.ParseFromString(data)
    except DecodeError:
        status.message = "a rank failed and sent no readable reason"
    return SluiceError.from_status(status, CODES.get(code, grpc.StatusCode.UNKNOWN))


class RankExchange:
    """Exchanges messages among the ranks that publish one model together.

    Every exchange is a collective operation: all ranks call it, in the same order, and if one fails, all fail. Nothing is
    pickled; answers are protobuf messages in uint8 tensors.

    Args:
        group: A process group of CPU tensors (gloo) that nothing else uses, since operations of two threads on one group
            would cross.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._out_of_step = False
        self.rank = dist.get_rank(group)

    def all_gather(self, step: str, answer: Answer, deadline: float) -> list[bytes]:
        """Send an answer to all ranks; return every rank's message, in the order of the ranks. Blocking.

        Args:
            step: What the exchange is about. Ranks at different steps (one was interrupted) must not mistake each other's
                answers.
            answer: This rank's message, or its failure.
            deadline: Time of `time.monotonic` at which to give up.

        Raises:
            SluiceError: the failure of the lowest rank that failed; FAILED_PRECONDITION RANK_LOST if a rank is gone, silent
                beyond the deadline or at another step. The group cannot be used after that.
        """
        if self._out_of_step:
            raise _gone("an earlier exchange was not finished")
        self._out_of_step = True
        code, data = to_wire(answer)
        mark = xxhash.xxh3_64_intdigest(step.encode()) >> 1  # into the range of int64
        lengths = self._gather(torch.tensor([code, len(data), mark], dtype=torch.int64), deadline)
        if any(int(each[2]) != mark for each in lengths):
            raise _gone(f"they are at different steps, this one at {step!r}")
        sizes = [int(each[1]) for each in lengths]
        longest = max(sizes)
        if longest > _MOST_ANSWER_BYTES:
            raise SluiceError.invalid_argument("tensors", f"a rank describes its slices in {longest} bytes: too many")
        padded = torch.zeros(max(1, longest), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        received = self._gather(padded, deadline)
        self._out_of_step = False
        return messages(
            [
                from_wire(int(length[0]), each[:size].numpy().tobytes())
                for length, size, each in zip(lengths, sizes, received, strict=True)
            ]
        )

    def _gather(self, tensor: torch.Tensor, deadline: float) -> list[torch.Tensor]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise _gone("no time is left")
        received = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._group))]
        try:
            work = dist.all_gather(received, tensor, group=self._group, async_op=True)
            work.wait(timedelta(seconds=remaining))
        except RuntimeError as error:  # what torch.distributed raises for a lost peer and for a timeout
            raise _gone(str(error).partition("\n")[0]) from error
        return received


def messages(answers: Sequence[Answer]) -> list[bytes]:
    """Return the ranks' messages; raise the failure of the lowest rank that failed."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, SluiceError):
            raise SluiceError(
                answer.code,
                answer.reason,
                f"rank {rank}: {answer.message}",
                retry_after_s=answer.retry_after_s,
                metadata=answer.metadata,
            )
    return [answer for answer in answers if isinstance(answer, bytes)]


def _gone(why: str) -> SluiceError:
    return SluiceError.failed_precondition(
        "RANK_LOST",
        f"the trainer's ranks cannot agree on a version ({why}); nothing was committed by this rank:"
        " start the ranks again with a new process group",
    )


def share_out(held: Sequence[pb.Shard]) -> list[set[TensorSlice]]:
    """Decide which rank sends which of the slices that the ranks hold.

    Raises:
        ManifestError: if the slices of all ranks do not cover every tensor exactly.
    """
    described = {TensorSlice.from_proto(tensor): tensor for shard in held for tensor in shard.tensors}
    _check_cover(list(described.values()))
    return assign_slices([{TensorSlice.from_proto(each): _size(each) for each in shard.tensors} for shard in held])


def total_bytes(held: Sequence[pb.Shard]) -> int:
    """Return the dense size of the model: each slice once, however many ranks hold it."""
    sizes = {(tensor.name, box(tensor)): _size(tensor) for shard in held for tensor in shard.tensors}
    return sum(sizes.values())


def _size(tensor: pb.TensorSlice) -> int:
    return math.prod(box(tensor).sizes) * DTYPES[tensor.dtype].size


def _check_cover(tensors: Sequence[pb.TensorSlice]) -> None:
    shard = pb.Shard(name="all")
    for index, tensor in enumerate(tensors):
        shard.tensors.add().CopyFrom(tensor)
        shard.tensors[-1].entry = str(index)
    check_manifest(pb.Manifest(shards=[shard]))
