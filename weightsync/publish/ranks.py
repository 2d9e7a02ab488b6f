"""How the ranks of a trainer agree on a version: who sends which slice, and in which form. No weights travel here."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import grpc
import torch
import torch.distributed as dist
import xxhash
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.manifest import Box, box, check_manifest
from weightsync.format.safetensors import DTYPES

_CODES = {code.value[0]: code for code in grpc.StatusCode}

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
    status, info = Status(), ErrorInfo()
    try:
        status.ParseFromString(data)
    except DecodeError:
        status.message = "a rank failed and sent no readable reason"
    for detail in status.details:
        detail.Unpack(info)
    known = _CODES.get(code, grpc.StatusCode.UNKNOWN)
    return SluiceError(known, info.reason or known.name, status.message, metadata=dict(info.metadata))


class Ranks:
    """The ranks that publish one model together.

    Every exchange is a collective operation: all ranks call it, in the same order, and if one fails, all fail. Nothing is
    pickled; answers are protobuf messages in uint8 tensors.

    Args:
        group: A process group of CPU tensors (gloo) that nothing else uses, since operations of two threads on one group
            would cross; None: this process is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._out_of_step = False
        self.rank = 0 if group is None else dist.get_rank(group)
        self.count = 1 if group is None else dist.get_world_size(group)

    def exchange(self, step: str, answer: Answer, deadline: float) -> list[bytes]:
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
        if self._group is None:
            return messages([answer])
        if self._out_of_step:
            raise _gone("an earlier exchange was not finished")
        self._out_of_step = True
        code, data = to_wire(answer)
        mark = xxhash.xxh3_64_intdigest(step.encode()) >> 1  # into the range of int64
        lengths = self._all_gather(torch.tensor([code, len(data), mark], dtype=torch.int64), deadline)
        if any(int(each[2]) != mark for each in lengths):
            raise _gone(f"they are at different steps, this one at {step!r}")
        sizes = [int(each[1]) for each in lengths]
        longest = max(sizes)
        if longest > _MOST_ANSWER_BYTES:
            raise SluiceError.invalid_argument("tensors", f"a rank describes its slices in {longest} bytes: too many")
        padded = torch.zeros(max(1, longest), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        received = self._all_gather(padded, deadline)
        self._out_of_step = False
        return messages(
            [
                from_wire(int(length[0]), each[:size].numpy().tobytes())
                for length, size, each in zip(lengths, sizes, received, strict=True)
            ]
        )

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


def messages(answers: Sequence[Answer]) -> list[bytes]:
    """Return the ranks' messages; raise the failure of the lowest rank that failed."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, SluiceError):
            if len(answers) == 1:
                raise answer
            raise SluiceError(answer.code, answer.reason, f"rank {rank}: {answer.message}", metadata=answer.metadata)
    return [answer for answer in answers if isinstance(answer, bytes)]


def _gone(why: str) -> SluiceError:
    return SluiceError.failed_precondition(
        "RANK_LOST",
        f"the trainer's ranks cannot agree on a version ({why}); nothing was committed by this rank:"
        " start the ranks again with a new process group",
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know of a version before its bytes travel.

    Attributes:
        delta: Whether it travels as the difference from the version before.
        compared: Whether every rank compared its shard with the version before.
        dense_bytes: Size of a dense copy, over all ranks.
        diff_s: Seconds of the slowest rank's comparison.
        changed_fraction: Values that differ, of all; 1 if nothing was compared.
    """

    delta: bool
    compared: bool
    dense_bytes: int
    diff_s: float
    changed_fraction: float


def agree(offers: Sequence[pb.Manifest]) -> Agreement:
    """Decide from every rank's offer; all ranks decide the same. Pure.

    A delta is pushed if every rank has one based on the same version, and they have at most half the bytes of a dense copy.

    Raises:
        SluiceError: FAILED_PRECONDITION if the ranks publish different versions.
    """
    versions = {Version.from_proto(offer.version) for offer in offers}
    if len(versions) > 1:
        raise SluiceError.failed_precondition(
            "RANKS_DIFFER",
            f"the ranks publish different versions ({', '.join(map(str, sorted(versions)))}): begin a new epoch on all of them",
        )
    dense = sum(offer.dense_bytes for offer in offers)
    bases = {Version.from_proto(offer.base) for offer in offers if offer.HasField("base")}
    compared = len(bases) == 1 and all(offer.HasField("base") for offer in offers)
    small = 2 * sum(offer.size_bytes for offer in offers) <= dense
    encoded = all(offer.kind == pb.VERSION_KIND_DELTA for offer in offers)
    weighted = sum(offer.push_timings.changed_fraction * offer.dense_bytes for offer in offers)
    return Agreement(
        delta=compared and encoded and small,
        compared=compared,
        dense_bytes=dense,
        diff_s=max(offer.push_timings.diff.ToNanoseconds() for offer in offers) / 1e9,
        changed_fraction=weighted / dense if dense else float(not compared),
    )


def assign_slices(held: Sequence[pb.Shard]) -> list[set[tuple[str, Box]]]:
    """Assign each slice to exactly one of the ranks that hold it. Pure, and the same on every rank.

    A slice that one rank alone holds is sent by that rank. What several hold (replicated DTensors, plain tensors) is
    assigned, largest first, to the holder that has least to send so far.

    Args:
        held: What each rank holds, by rank.

    Returns:
        For each rank the slices that it sends: name and place.

    Raises:
        ManifestError: if the slices of all ranks do not cover every tensor exactly.
    """
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    described: dict[tuple[str, Box], pb.TensorSlice] = {}
    for rank, shard in enumerate(held):
        for tensor in shard.tensors:
            key = (tensor.name, box(tensor))
            holders[key].append(rank)
            described[key] = tensor
    _check_cover(list(described.values()))
    sizes = {key: _size(described[key]) for key in described}
    order = sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key))
    load = [0] * len(held)
    assigned: list[set[tuple[str, Box]]] = [set() for _ in held]
    for key in order:
        rank = min(holders[key], key=lambda rank: (load[rank], rank))
        assigned[rank].add(key)
        load[rank] += sizes[key]
    return assigned


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
