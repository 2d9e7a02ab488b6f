"""The ranks of a trainer, led by rank 0: all ranks carry out every command that changes weights, or all end.

Rank 0 posts a command, does its own part, and waits until the others have done theirs. After a failure of any rank the weights
may differ and the collectives no longer match, so the group is broken for good: the process ends, torchrun starts all ranks
again, and they continue from the newest checkpoint.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypeAlias, get_args

import structlog
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from safetensors.torch import load, save

from sluice.rpc import SluiceError
from sluice.versions import Version, VersionSpan
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.parallel.balance import balance
from trainer_svc.parallel.mesh import Mesh

OUT_OF_STEP = {"COMPUTE_DEADLINE", "RANK_LOST"}
"""Errors that leave ranks at different commands: a rank is gone, or its progress is unknown."""

Assign: TypeAlias = Callable[[Sequence[TrainingRow], int], list[list[int]]]
"""Takes rows and the number of data-parallel ranks; returns the places of each rank's rows."""

log = structlog.get_logger(__name__)


# The commands that rank 0 posts for the other ranks.


@dataclass(frozen=True, slots=True)
class Position:
    """State that only rank 0 keeps up to date: see `version`, `made_as` and `last_batch_id` of `Learner`."""

    version: Version
    made_as: Version
    last_batch_id: str


@dataclass(frozen=True, slots=True)
class Load:
    """Load the base model, and read the checkpoints of the run."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Begin an epoch from the first whole checkpoint of a list."""

    position: Position
    epoch: int
    checkpoints: list[str]


@dataclass(frozen=True, slots=True)
class Train:
    """Train on this rank's rows of a batch. The rows are sent right after the command."""

    batch_id: str
    halved: bool
    changed_lr: float | None


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode the weights for publication."""

    position: Position
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Save:
    """Copy the state for a checkpoint, and write this rank's part in the background."""

    position: Position
    journal_position: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Push this rank's part of the last encoded version."""

    version: Version
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""

    exit_code: int


Command: TypeAlias = Load | Restore | Train | Encode | Save | Publish | Stop

MAY_FAIL = (Save,)
"""Commands that may fail without breaking the group, because they fail on all ranks."""

_KINDS: dict[str, type[Command]] = {kind.__name__: kind for kind in get_args(Command)}


def encode_command(command: Command) -> str:
    """Return a command as JSON: its name and its fields."""
    kind = type(command)
    return json.dumps([kind.__name__, TypeAdapter(kind).dump_python(command, mode="json")])


def decode_command(text: str | bytes) -> Command:
    """Decode the result of `encode_command`.

    Raises:
        RuntimeError: if this release does not know the command, or one of its fields.
    """
    try:
        name, given = json.loads(text)
        return TypeAdapter(_KINDS[name]).validate_python(given)
    except (ValueError, LookupError, TypeError) as error:
        raise RuntimeError(
            f"rank 0 gave the unknown command {text!r:.200}: run the same release on every rank"
        ) from error


# The group.


@dataclass(frozen=True, slots=True)
class Assignment:
    """This rank's rows, and for each data-parallel rank the places of its rows in the batch."""

    rows: list[TrainingRow]
    places: list[list[int]]


class RankGroup:
    """The ranks of a trainer that has several, led by rank 0.

    Args:
        link: To the other ranks.
        on_broken: Called once, from any thread, when the ranks cannot continue.
    """

    def __init__(self, link: RankLink, *, on_broken: Callable[[], object] = lambda: None) -> None:
        self._link = link
        self._on_broken = on_broken
        self.broken: SluiceError | None = None

    @contextmanager
    def on_all_ranks(
        self, command: Command, rows: Sequence[TrainingRow] | None = None, *, assign: Assign = balance
    ) -> Iterator[Assignment]:
        """Run a command on every rank: the other ranks carry it out, this rank runs the body of the `with` block.

        Args:
            command: The command for the other ranks.
            rows: Rows to distribute over the data-parallel ranks.
            assign: Decides which rank gets which rows.

        Yields:
            The rows of this rank, and which rank has which rows.

        Raises:
            SluiceError: UNAVAILABLE RANK_LOST if another rank failed or did not answer in time.
        """
        if self.broken is not None:
            raise self.broken
        failure: Exception | None = None
        try:
            number = self._link.post("compute", command)
            assignment = Assignment([], []) if rows is None else _distribute(self._link, rows, assign)
            try:
                yield assignment
            except Exception as error:
                if not isinstance(command, MAY_FAIL):
                    raise
                failure = error
            self._link.wait_done(number)
        except BaseException as error:
            reason = self.give_up(error)
            if reason is error:
                raise
            raise reason from error
        if failure is not None:
            raise failure

    def publish(self, version: Version, deadline_s: float) -> None:
        """Have the other ranks publish the last encoded version, concurrently with this rank."""
        self._link.post("publish", Publish(version, deadline_s))

    def stop_others(self, exit_code: int) -> None:
        """Tell the other ranks to end with this exit code; this process ends next.

        The launcher ends with the exit code of the rank that ends first.
        """
        if self.broken is None:
            for stream in _STREAMS:
                self._link.post(stream, Stop(exit_code))

    def give_up(self, error: BaseException) -> SluiceError:
        """Note that the ranks cannot continue.

        Returns:
            The error to raise: `error` itself, or RANK_LOST with its reason.
        """
        if self.broken is None:
            self.broken = _explain(error, self._link)
            log.error("the ranks cannot continue", error=str(self.broken), exc_info=error)
            self._on_broken()
        return self.broken


def _distribute(link: RankLink, rows: Sequence[TrainingRow], assign: Assign) -> Assignment:
    places = assign(rows, link.dims.data_parallel)
    by_rank = [[rows[place] for place in part] for part in places]
    link.send_rows(by_rank)
    return Assignment(by_rank[link.dims.data_rank(link.rank)], places)


def _explain(error: BaseException, link: RankLink) -> SluiceError:
    """Return the error of the rank that failed first if it reported one, else what this rank saw."""
    if isinstance(error, SluiceError):
        return _lost(error.message) if error.reason in OUT_OF_STEP else error
    if isinstance(error, RankFailedError):
        return _lost(str(error))
    seen = str(error).partition("\n")[0].partition(". ")[0]  # the first sentence; gloo adds advice
    return _lost(link.failure() or f"{type(error).__name__}: {seen}")


def _lost(reason: str) -> SluiceError:
    return SluiceError.unavailable(
        "RANK_LOST",
        f"a rank of the trainer failed ({reason}); all ranks start again and continue from the newest checkpoint",
        retry_after_s=1.0,
    )


# The connection between the ranks.

Stream: TypeAlias = Literal["compute", "publish"]
"""Commands of one stream run one after another; the two streams run concurrently."""

_STREAMS: tuple[Stream, ...] = get_args(Stream)

IDLE = timedelta(hours=1)
"""Longest single wait for a command; a rank then waits again."""

PUBLISHES_KEPT = 2
"""Publish commands that are kept in the store. All ranks push together, so no rank is more than one command behind."""

_FAILURE = "failure"


class RankFailedError(Exception):
    """A rank failed or is gone."""


class RankLink:
    """One rank's connection to the others: commands through a key-value store, rows as bytes through a gloo group.

    All ranks create their links at the same time. Commands go through a `TCPStore` of rank 0, where a rank can wait without a limit;
    a collective would time out while a run pauses. When rank 0 ends, the wait ends at once.

    Args:
        mesh: The ranks.
        timeout_s: Seconds that the others may take to answer a command.
    """

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self.rank, self.dims = mesh.rank, mesh.dims
        self._timeout = timedelta(seconds=timeout_s)
        self._group = mesh.everyone
        self.publishing = dist.new_group(backend="gloo", timeout=self._timeout)
        """Group of the publishers, whose exchanges run concurrently with the commands."""
        self._stores: dict[Stream, dist.TCPStore] = self._open_stores()
        self._numbers: dict[Stream, int] = {"compute": 0, "publish": 0}

    def _open_stores(self) -> dict[Stream, dist.TCPStore]:
        """Open a connection per stream, because a connection that waits cannot be used for anything else."""
        host = os.environ["MASTER_ADDR"]
        port = torch.zeros(1, dtype=torch.int64)
        held = None
        if self.rank == 0:
            held = dist.TCPStore(host, 0, is_master=True, timeout=self._timeout, wait_for_workers=False)
            port[0] = held.port
        dist.broadcast(port, src=0, group=self._group)
        compute = held or dist.TCPStore(host, int(port), timeout=self._timeout)
        return {"compute": compute, "publish": dist.TCPStore(host, int(port), timeout=self._timeout)}

    @property
    def others(self) -> range:
        """All ranks except rank 0."""
        return range(1, self.dims.world_size)

    def post(self, stream: Stream, command: Command) -> int:
        """Post the next command for the other ranks, as rank 0. Return its number in its stream."""
        number = self._numbers[stream] = self._numbers[stream] + 1
        store = self._stores[stream]
        store.set(f"{stream}/{number}", encode_command(command))
        if stream == "publish" and number > PUBLISHES_KEPT:
            store.delete_key(f"{stream}/{number - PUBLISHES_KEPT}")
        return number

    def next(self, stream: Stream) -> Command:
        """Wait for the next command; the other ranks call this.

        Raises:
            RankFailedError: if rank 0 is gone.
            RuntimeError: if this release does not know the command. For commands that compute, rank 0 gets the error, too.
        """
        number = self._numbers[stream] = self._numbers[stream] + 1
        key = f"{stream}/{number}"
        store = self._stores[stream]
        while True:
            try:
                store.wait([key], IDLE)
                text = store.get(key)
            except dist.DistStoreError:
                continue  # no command came within `IDLE`
            except RuntimeError as error:
                first_line = str(error).partition("\n")[0]
                raise RankFailedError(f"rank 0 is gone ({first_line})") from error
            break
        try:
            return decode_command(text)
        except RuntimeError as error:
            if stream == "compute":
                self.done(f"{type(error).__name__}: {error}")
            raise

    def done(self, failure: str = "") -> None:
        """Report to rank 0 that the last compute command is done, or why this rank ends instead.

        Raises:
            RuntimeError: if rank 0 is gone.
        """
        store = self._stores["compute"]
        reason = f"rank {self.rank}: {failure}" if failure else ""
        if reason:
            store.set(_FAILURE, reason)
        store.set(_done(self._numbers["compute"], self.rank), reason)

    def failure(self) -> str:
        """Return the reason that a rank reported for its end; empty if no rank reported one."""
        store = self._stores["compute"]
        return bytes(store.get(_FAILURE)).decode() if store.check([_FAILURE]) else ""

    def wait_done(self, number: int) -> None:
        """Wait until every rank has carried out a command.

        Raises:
            RankFailedError: if a rank failed, or did not answer in time.
        """
        store = self._stores["compute"]
        keys = [_done(number, rank) for rank in self.others]
        try:
            store.wait(keys, self._timeout)
        except RuntimeError as error:
            late = [rank for rank, key in zip(self.others, keys, strict=True) if not store.check([key])]
            raise RankFailedError(
                self.failure() or f"ranks {late} did not answer within {self._timeout.total_seconds():g} s"
            ) from error
        if failure := self.failure():
            raise RankFailedError(failure)
        for key in (*keys, f"compute/{number}"):
            store.delete_key(key)

    def send_rows(self, by_rank: Sequence[Sequence[TrainingRow]]) -> None:
        """Send each rank the rows of its data-parallel rank.

        Raises:
            RuntimeError: if a rank is gone, or does not receive them within the group's timeout.
        """
        encoded = [torch.frombuffer(bytearray(encode_rows(rows)), dtype=torch.uint8) for rows in by_rank]
        pending: list[dist.Work | None] = []
        for rank in self.others:
            data = encoded[self.dims.data_rank(rank)]
            pending.append(dist.isend(torch.tensor([len(data)]), rank, group=self._group))
            pending.append(dist.isend(data, rank, group=self._group))
        _wait(pending, self._timeout)

    def receive_rows(self) -> list[TrainingRow]:
        """Receive this rank's rows.

        Raises:
            RuntimeError: if rank 0 is gone, or sends nothing within the group's timeout.
        """
        size = torch.zeros(1, dtype=torch.int64)
        _wait([dist.irecv(size, 0, group=self._group)], self._timeout)
        data = torch.empty(int(size), dtype=torch.uint8)
        _wait([dist.irecv(data, 0, group=self._group)], self._timeout)
        return decode_rows(data.numpy().tobytes())


def _wait(pending: Iterable[dist.Work | None], timeout: timedelta) -> None:
    for work in pending:
        if work is not None:
            work.wait(timeout)


def _done(number: int, rank: int) -> str:
    return f"done/{number}/{rank}"


# Rows as bytes: a safetensors file with one tensor per column, all rows end to end. Fields that are not tensors (ids,
# temperature, reward, version spans) are JSON in the file's metadata.

ROWS = "rows"
"""Metadata key of the fields that are not tensors."""

HOLDERS = "rows."
"""Prefix of the name of a tensor that marks which rows have a column, if not all rows have it."""


def encode_rows(rows: Sequence[TrainingRow]) -> bytes:
    """Encode rows.

    Raises:
        ValueError: if a column has different dtypes in different rows.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain: list[dict[str, Any]] = [{"tokens": len(row)} for row in rows]
    for name in (field.name for field in fields(TrainingRow)):
        values = [getattr(row, name) for row in rows]
        holders = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        if not holders:
            for row, value in zip(plain, values, strict=True):
                row[name] = [(start, *version) for start, version in value] if name == "versions" else value
            continue
        if len({values[place].dtype for place in holders}) > 1:
            raise ValueError(f"column {name} has several dtypes: give all rows the same")
        tensors[name] = torch.cat([values[place] for place in holders])
        if len(holders) < len(rows):
            tensors[HOLDERS + name] = torch.tensor(holders)
    data: bytes = save(tensors, metadata={ROWS: json.dumps(plain)})
    return data


def decode_rows(data: bytes) -> list[TrainingRow]:
    """Decode the result of `encode_rows`.

    Raises:
        ValueError: if the bytes are not encoded rows.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)  # the header: safetensors can only read it from files
        plain = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][ROWS])
        lengths = [row.pop("tokens") for row in plain]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"these bytes are not encoded rows: {error}") from error
    tensors = load(data)
    for name, column in tensors.items():
        if name.startswith(HOLDERS):
            continue
        holders = tensors[HOLDERS + name].tolist() if HOLDERS + name in tensors else range(len(plain))
        parts = column.split([lengths[place] for place in holders])
        for place, part in zip(holders, parts, strict=True):
            plain[place][name] = part
    for row in plain:
        row["versions"] = tuple(VersionSpan(start, Version(*version)) for start, *version in row["versions"])
    return [TrainingRow(**row) for row in plain]
