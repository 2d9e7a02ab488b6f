"""The processes of one trainer: which of them share weights, rows of tokens, or layers, and how they find each other at start.

`Ranks` exchange numbers and bytes, and `agree` makes all of them fail if one fails.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import groupby
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer_svc.batch.rows import TrainingRow
from trainer_svc.compute_config import MESH_AXES, ParallelConfig, ParallelDims

T = TypeVar("T")

WEIGHT_AXES = ("pp", "dp_replicate", "fsdp", "tp")
"""Axes of the device mesh that weights are laid out on. The `dp_shard` x `cp` processes of axis `fsdp` share one copy of the weights."""

DIGEST_BYTES = 7
"""Size of a digest of rows, which is a positive int64."""

ASKED, ANSWER, CONFIRMED = "meeting/asked/{}", "meeting/answer/{}/{}", "meeting/confirmed/{}/{}"
"""Keys in the store when processes start: a rank's question, the answer to it, and the rank's confirmation."""

POLL_S = 0.02
"""Seconds between two checks of rank 0 for processes that have started."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A group of ranks, seen from one of them.

    Every rank makes the same calls. All methods raise RuntimeError if a rank has died or does not answer within the group's timeout.

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
        """Return the sums over the ranks, or the maximum for names that begin with ``max_``. All ranks give the same names."""
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
        """Return `total` for names that may differ between ranks; a rank that lacks a name contributes nothing to it."""
        names = {
            name for answer in self.exchange("\n".join(values).encode()) for name in answer.decode().split("\n") if name
        }
        return self.total({name: values.get(name, -math.inf if name.startswith("max_") else 0.0) for name in names})

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, in the order of ranks. Ranks may have different numbers of rows.

        Args:
            rows: A CPU tensor. All ranks have the same dtype and, except for the first dimension, the same shape.
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
        """Return the contents of all ranks, in the order of ranks."""
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
        OtherRankRefusedError: if the first other rank that raised has raised ValueError.
        OtherRankError: if it has raised any other exception.
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


@dataclass(frozen=True, slots=True)
class Mesh:
    """The processes of a trainer, seen from this one.

    Attributes:
        device: Where this process computes: "cpu", or its own CUDA device.
        ranks: The data-parallel ranks, which have different rows; a CPU group for numbers.
        weights: Device mesh of `WEIGHT_AXES`; None for one process.
        context: The processes that share packed rows with this one; None if it has whole rows.
        stages: The pipeline stages of this process's rows, in order; None without a pipeline.
        everyone: All processes; a CPU group for numbers and bytes.
    """

    dims: ParallelDims
    rank: int
    device: torch.device | None
    ranks: Ranks
    weights: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None
    stages: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None

    @property
    def place(self) -> dict[str, int]:
        """This process's place on each axis, from 0."""
        return self.dims.place(self.rank)

    @property
    def tensor(self) -> DeviceMesh | None:
        """The processes that share matrix products; None without tensor parallelism."""
        return self.weights["tp"] if self.weights is not None and self.dims.tp > 1 else None

    @property
    def data(self) -> DeviceMesh | None:
        """The axis that FSDP shards over, or two axes: one to replicate over, one to shard over. None for one process."""
        if self.weights is None or self.dims.dp_shard * self.dims.cp * self.dims.dp_replicate == 1:
            return None
        return self.weights["fsdp"] if self.dims.dp_replicate == 1 else self.weights["dp_replicate", "fsdp"]

    def check_same_rows(self, sequences: Sequence[TrainingRow]) -> None:
        """Check that processes which share a forward pass have the same rows. With different rows they would hang or compute nonsense.

        All processes call this.

        Raises:
            ValueError: on every process, if processes that have to share rows (tp, cp, pp) have different rows.
        """
        largest = 1 << (8 * DIGEST_BYTES)
        groups = self.dims.data_parallel
        if self.everyone is None or groups == self.dims.world_size:
            return
        place, digest = self.dims.data_rank(self.rank), _rows_digest(sequences)
        bounds = torch.zeros(2, groups, dtype=torch.int64)
        bounds[:, place] = torch.tensor([digest, largest - digest])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, self.everyone)
        differing = (bounds.sum(0) != largest).nonzero().flatten().tolist()
        if differing:
            ranks = ", ".join(map(str, self.dims.ranks_of(differing[0])))
            raise ValueError(
                f"ranks {ranks} share their rows (tp, cp, pp) but were given different ones: pass the same rows, in the same"
                " order, to all of them"
            )

    def leave(self) -> None:
        """Leave the process group. Call it last in every process that joined one."""
        if self.weights is not None and dist.is_initialized():
            dist.destroy_process_group()


SINGLE = Mesh(ParallelDims(), 0, None, ALONE)
"""A single process, with the whole model and the whole batch."""


def join(config: ParallelConfig, device: str = "auto") -> Mesh:
    """Join the other processes of this trainer, as torchrun's environment variables describe them.

    Call it once per process before any other use of `torch.distributed`, and `Mesh.leave` at the end. Without torchrun
    (no `WORLD_SIZE` in the environment) return `SINGLE`. `device` auto takes CUDA if there is a device.

    Raises:
        ValueError: if the product of the axes is not the number of processes, or this host has more processes than CUDA devices.
        torch.distributed.DistError: if the other processes do not join within `config.timeout_s`.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    dims = ParallelDims.of(config, world_size)
    if world_size == 1:
        return SINGLE
    own = _own_device(device)
    timeout = timedelta(seconds=config.timeout_s)
    if not dist.is_initialized():
        store = _fresh_store(timeout)
        place = {} if store is None else {"rank": int(os.environ["RANK"]), "world_size": world_size}
        backend = "cuda:nccl,cpu:gloo" if own.type == "cuda" else "gloo"
        # No `device_id` here. With it, processes outside of a new group split NCCL's group of all processes and wait for the new group's
        # members. Members of a gloo group never join that split (pytorch/pytorch#145376).
        dist.init_process_group(backend, timeout=timeout, store=store, **place)
    return make_mesh(dims, own, timeout)


def make_mesh(dims: ParallelDims, device: torch.device, timeout: timedelta) -> Mesh:
    """Create and connect the groups of a mesh after all processes have joined. Every process calls this with the same sizes.

    Raises:
        ValueError: if the product of the axes is not the number of processes.
        RuntimeError: if the processes of a group do not connect within `timeout`.
    """
    if dims.world_size != dist.get_world_size():
        raise ValueError(f"{dims} makes {dims.world_size} processes, but {dist.get_world_size()} have joined")
    backend = "nccl" if device.type == "cuda" else "gloo"

    def group(axes: Iterable[str], of: str = backend) -> dist.ProcessGroup:
        own, _ = dist.new_subgroups_by_enumeration(_partition(dims, set(axes)), timeout=timeout, backend=of)
        return own

    groups = [group(axes) for axes in (["pp"], ["dp_replicate"], ["dp_shard", "cp"], ["tp"])]
    shape = (dims.pp, dims.dp_replicate, dims.dp_shard * dims.cp, dims.tp)
    layout = torch.arange(dims.world_size, dtype=torch.int).view(shape)
    context = group(["cp"]) if dims.cp > 1 else None
    for each in (*groups, *([] if context is None else [context])):
        _connect(each, device)
    return Mesh(
        dims=dims,
        rank=dist.get_rank(),
        device=device,
        ranks=Ranks(group(["dp_replicate", "dp_shard"], "gloo")) if dims.data_parallel > 1 else ALONE,
        weights=DeviceMesh.from_group(groups, device.type, layout, mesh_dim_names=WEIGHT_AXES),
        context=context,
        stages=groups[0] if dims.pp > 1 else None,
        everyone=group(MESH_AXES, "gloo"),
    )


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect the processes of a group, and wait until all are connected.

    NCCL connects a group in its first operation, in which all processes of the group have to take part. If that were a transfer
    between two stages of a pipeline with three or more stages, processes might wait for each other forever.
    """
    if dist.get_world_size(group) > 1:
        arrived = torch.ones(1, device=device)
        dist.all_reduce(arrived, group=group)
        arrived.item()  # waits for the device


def _partition(dims: ParallelDims, axes: set[str]) -> list[list[int]]:
    """Split all ranks into groups whose ranks differ only on the given axes, each in ascending order."""

    def others(rank: int) -> tuple[int, ...]:
        return tuple(place for axis, place in sorted(dims.place(rank).items()) if axis not in axes)

    return [list(ranks) for _, ranks in groupby(sorted(range(dims.world_size), key=others), key=others)]


def _own_device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    # All processes of the host decide alike, so that none waits for a process that was refused.
    processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1)), torch.cuda.device_count()
    if processes > devices:
        raise ValueError(
            f"{processes} processes of this host need a CUDA device each, and {devices} are visible: start"
            " one process per device (torchrun --nproc-per-node), or set device to cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _fresh_store(timeout: timedelta) -> dist.Store | None:
    """Return an empty key-value store that only the processes of this start share.

    torchrun's agent keeps one store for all starts of a job. After a restart, processes would find in it the addresses of
    processes that were killed (pytorch/pytorch#135712). The processes of each start therefore agree on a new prefix. The
    number of the restart cannot be the prefix, because the agents of several nodes count restarts separately.

    Returns:
        The store; None if no agent has one. Then rank 0 makes one by itself.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = _name_start(store, count, timeout) if rank == 0 else _ask_for_start(store, rank, timeout)
    return dist.PrefixStore(f"start/{start}", store)


def _name_start(store: dist.Store, count: int, timeout: timedelta) -> str:
    """Choose a name for this start and send it to every process that asks. A process that never confirms belongs to an earlier start."""
    start = uuid.uuid4().hex
    missing = set(range(1, count))
    give_up = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([ASKED.format(rank)]):
                question = store.get(ASKED.format(rank)).decode()
                store.set(ANSWER.format(rank, question), start)
            if store.check([CONFIRMED.format(start, rank)]):
                missing.discard(rank)
        if missing and time.monotonic() > give_up:
            seconds = timeout.total_seconds()
            raise dist.DistStoreError(
                f"ranks {sorted(missing)} did not join within {seconds:g} s: look at their logs, or raise trainer.parallel.timeout_s"
            )
        time.sleep(POLL_S)
    return start


def _ask_for_start(store: dist.Store, rank: int, timeout: timedelta) -> str:
    question = uuid.uuid4().hex
    store.set(ASKED.format(rank), question)
    store.wait([ANSWER.format(rank, question)], timeout)
    start = str(store.get(ANSWER.format(rank, question)).decode())
    store.set(CONFIRMED.format(start, rank), b"")
    return start


def _rows_digest(sequences: Sequence[TrainingRow]) -> int:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for sequence in sequences:
        for each in fields(sequence):
            value = getattr(sequence, each.name)
            if isinstance(value, torch.Tensor):
                digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(value).encode())
    return int.from_bytes(digest.digest())
