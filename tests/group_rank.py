"""One rank of a trainer without a model, as a program: hands out rows, waits, fails, and writes down what it saw.

Argument: directory for its notes. Rank, count and meeting point come from the environment, as torchrun gives them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from sluice.rpc import SluiceError
from sluice.versions import Version
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.compute_config import ParallelDims
from trainer_svc.parallel.mesh import make_mesh
from trainer_svc.service.rank_group import Load, Position, RankFailedError, RankGroup, RankLink, Save, Train

TIMEOUT_S = 250.0
"""Limit in seconds for a collective, or for the answer to a command."""

SHORT_S = 1.0
"""The limit for tests that exceed it on purpose: no correct operation has to finish within it."""

POLL_S = 0.02

TRAIN = Train("b1", halved=False, changed_lr=None)
SAVE = Save(Position(Version(2, 7), Version(2, 7), "b1"), journal_position=3)

NOTES: dict[str, object] = {}


def row(name: str, length: int) -> TrainingRow:
    mask = torch.zeros(length, dtype=torch.bool)
    mask[1:] = True
    values = torch.full((length,), 0.5)
    return TrainingRow(torch.arange(length), mask, values, values, trajectory_id=name)


def limit(link: RankLink, seconds: float) -> None:
    """Change the limit for a collective, or for the answer to a command, on a link."""
    link._timeout = timedelta(seconds=seconds)
    dist.distributed_c10d._set_pg_timeout(link._timeout, link._group)
    for store in link._stores.values():
        store.set_timeout(link._timeout)


def note(name: str) -> Path:
    """Return the file by which one rank says something to the other."""
    return Path(sys.argv[1], name)


def lead(data: RankLink, tensor: RankLink, silent: RankLink) -> None:
    rows = [row(name, length) for name, length in (("a", 9), ("b", 5), ("c", 4))]
    broken: list[bool] = []
    ranks = RankGroup(data, on_broken=lambda: broken.append(True))
    with ranks.on_all_ranks(TRAIN, rows) as assignment:
        NOTES["data"] = [each.trajectory_id for each in assignment.rows]
    with RankGroup(tensor).on_all_ranks(TRAIN, rows) as assignment:
        NOTES["tensor"] = [each.trajectory_id for each in assignment.rows]
    limit(data, SHORT_S)
    while not note("waits").exists():
        time.sleep(POLL_S)
    time.sleep(2 * SHORT_S)  # a run that pauses: nobody is in a collective meanwhile
    limit(data, TIMEOUT_S)
    with ranks.on_all_ranks(TRAIN, rows[:1]) as assignment:
        NOTES["after a pause"] = [each.trajectory_id for each in assignment.rows]
    try:
        with ranks.on_all_ranks(SAVE):
            Path("/not/there/at/all").touch()
    except OSError as error:
        NOTES["save"] = type(error).__name__
    for _ in range(2):
        try:
            with ranks.on_all_ranks(TRAIN, rows):
                pass
        except SluiceError as error:
            NOTES["failed"] = f"{error.code.name} {error.reason} {error.message}"
    NOTES["told"] = len(broken)
    limit(silent, SHORT_S)
    try:
        with RankGroup(silent).on_all_ranks(Load()):
            pass
    except SluiceError as error:
        NOTES["silent"] = error.message


def follow(data: RankLink, tensor: RankLink, _silent: RankLink) -> None:
    for link, what in ((data, "data"), (tensor, "tensor"), (data, "after a pause")):
        if what == "after a pause":
            limit(link, SHORT_S)
            note("waits").touch()
        link.next("compute")
        limit(link, TIMEOUT_S)
        NOTES[what] = [each.trajectory_id for each in link.receive_rows()]
        link.done()
    NOTES["save"] = link.next("compute") == SAVE
    link.done()
    link.next("compute")
    link.receive_rows()
    link.done("ValueError: no such token")
    try:
        link.next("compute")
    except RankFailedError as error:
        NOTES["left alone"] = str(error)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    timeout = timedelta(seconds=TIMEOUT_S)
    links = [
        RankLink(make_mesh(dims, torch.device("cpu"), timeout), TIMEOUT_S)
        for dims in (ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(pp=2))
    ]
    rank = dist.get_rank()
    (follow if rank else lead)(*links)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(NOTES))
    os._exit(0)  # a group whose other member ended cannot be taken down in order


if __name__ == "__main__":
    main()
