"""Between rank 0 and the other ranks of a trainer: commands through a store of keys, rows as bytes, what came of both.

Commands go through a `TCPStore` that rank 0 holds, since a rank may wait there for as long as it likes: a collective would
end with its timeout in a run that pauses. The end of rank 0 ends the wait at once. Rows go through a gloo group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from trainer_svc.batch.rows import Sequence
from trainer_svc.parallel.mesh import Mesh
from trainer_svc.service.row_codec import decode_rows, encode_rows

__all__ = ["Command", "CrewLink", "RankFailedError", "Stream"]

Command: TypeAlias = Mapping[str, Any]
"""What to do: JSON values by name, `do` among them."""

Stream: TypeAlias = Literal["compute", "publish"]
"""Commands of one stream are carried out one after another; those of the two side by side."""

IDLE = timedelta(hours=1)
"""One wait for a command; then it is waited for again."""

PUBLISHES_KEPT = 2
"""Commands to publish that stay in the store: a push is one of all ranks, so none is more than one behind."""

_FAILURE = "failure"


class RankFailedError(Exception):
    """A rank failed, or is gone."""


class CrewLink:
    """One process's end of the link. All processes make theirs at the same time.

    Args:
        mesh: The processes.
        timeout_s: Seconds that the others may take to answer a command.
    """

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self.rank, self.dims = mesh.rank, mesh.dims
        self._timeout = timedelta(seconds=timeout_s)
        self._group = mesh.everyone
        self.publishing = dist.new_group(backend="gloo", timeout=self._timeout)
        """For the publishers alone, as their exchanges go on beside the commands."""
        self._stores: dict[Stream, dist.TCPStore] = self._open_stores()
        self._numbers: dict[Stream, int] = {"compute": 0, "publish": 0}

    def _open_stores(self) -> dict[Stream, dist.TCPStore]:
        """A connection per stream: one that waits blocks every other use of it."""
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
        """All ranks but rank 0."""
        return range(1, self.dims.world_size)

    def post(self, stream: Stream, command: Command) -> int:
        """Tell the other ranks what to do next; rank 0 alone.

        Returns:
            The command's number in its stream.
        """
        number = self._numbers[stream] = self._numbers[stream] + 1
        store = self._stores[stream]
        store.set(f"{stream}/{number}", json.dumps(command))
        if stream == "publish" and number > PUBLISHES_KEPT:
            store.delete_key(f"{stream}/{number - PUBLISHES_KEPT}")
        return number

    def next(self, stream: Stream) -> Command:
        """Wait for the next command; for the other ranks.

        Raises:
            RankFailedError: if rank 0 is gone.
        """
        number = self._numbers[stream] = self._numbers[stream] + 1
        key = f"{stream}/{number}"
        store = self._stores[stream]
        while True:
            try:
                store.wait([key], IDLE)
                return dict(json.loads(store.get(key)))
            except dist.DistStoreError:
                continue  # nothing was to be done for so long
            except RuntimeError as error:
                raise RankFailedError(f"rank 0 is gone ({_first_line(error)})") from error

    def done(self, failure: str = "") -> None:
        """Tell rank 0 that the last command of the compute stream is carried out, or why this rank ends instead.

        Raises:
            RuntimeError: if rank 0 is gone.
        """
        store = self._stores["compute"]
        told = f"rank {self.rank}: {failure}" if failure else ""
        if told:
            store.set(_FAILURE, told)
        store.set(_done(self._numbers["compute"], self.rank), told)

    def failure(self) -> str:
        """Why a rank ended, as far as it could say; empty if none did."""
        store = self._stores["compute"]
        return bytes(store.get(_FAILURE)).decode() if store.check([_FAILURE]) else ""

    def wait_done(self, number: int) -> None:
        """Wait until every rank has carried a command out.

        Raises:
            RankFailedError: if one failed, or did not in time.
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

    def send_rows(self, shares: Rows[Rows[Sequence]]) -> None:
        """Send each rank the share of its data-parallel rank.

        Args:
            shares: Rows by data-parallel rank.

        Raises:
            RuntimeError: if a rank is gone, or does not take them within the group's timeout.
        """
        encoded = [torch.frombuffer(bytearray(encode_rows(share)), dtype=torch.uint8) for share in shares]
        pending: list[dist.Work | None] = []
        for rank in self.others:
            data = encoded[self.dims.data_rank(rank)]
            pending.append(dist.isend(torch.tensor([len(data)]), rank, group=self._group))
            pending.append(dist.isend(data, rank, group=self._group))
        _wait(pending, self._timeout)

    def receive_rows(self) -> list[Sequence]:
        """This rank's share.

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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
