"""One rank of a crew without a model, as a program: hands out rows, waits, fails, and writes down what it saw.

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
from trainer_svc.batch.rows import Sequence
from trainer_svc.parallel.dims import ParallelDims
from trainer_svc.parallel.mesh import make_mesh
from trainer_svc.service.crew import Crew
from trainer_svc.service.crew_link import CrewLink, RankFailedError

TIMEOUT_S = 3.0
"""What a collective, or the answer to a command, may take."""

NOTES: dict[str, object] = {}


def row(name: str, length: int) -> Sequence:
    mask = torch.zeros(length, dtype=torch.bool)
    mask[1:] = True
    values = torch.full((length,), 0.5)
    return Sequence(torch.arange(length), mask, values, values, trajectory_id=name)


def lead(data: CrewLink, tensor: CrewLink, silent: CrewLink) -> None:
    rows = [row(name, length) for name, length in (("a", 9), ("b", 5), ("c", 4))]
    crew = Crew(data)
    with crew.together("train", rows) as dealt:
        NOTES["data"] = [each.trajectory_id for each in dealt.rows]
    with Crew(tensor).together("train", rows) as dealt:
        NOTES["tensor"] = [each.trajectory_id for each in dealt.rows]
    time.sleep(1.2 * TIMEOUT_S)  # a run that pauses: nobody is in a collective meanwhile
    with crew.together("train", rows[:1]) as dealt:
        NOTES["after a pause"] = [each.trajectory_id for each in dealt.rows]
    try:
        with crew.together("save", may_fail=True):
            Path("/not/there/at/all").touch()
    except OSError as error:
        NOTES["save"] = type(error).__name__
    broken: list[bool] = []
    crew.on_broken = lambda: broken.append(True)
    for _ in range(2):
        try:
            with crew.together("train", rows):
                pass
        except SluiceError as error:
            NOTES["failed"] = f"{error.code.name} {error.reason} {error.message}"
    NOTES["told"] = len(broken)
    try:
        with Crew(silent).together("load"):
            pass
    except SluiceError as error:
        NOTES["silent"] = error.message


def follow(data: CrewLink, tensor: CrewLink, _silent: CrewLink) -> None:
    for link, what in ((data, "data"), (tensor, "tensor"), (data, "after a pause")):
        link.next("compute")
        NOTES[what] = [each.trajectory_id for each in link.receive_rows()]
        link.done()
    NOTES["save"] = link.next("compute")["do"]
    link.done()
    link.next("compute")
    link.receive_rows()
    link.done("ValueError: no such token")
    try:
        link.next("compute")
    except RankFailedError as error:
        NOTES["left alone"] = str(error)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    timeout = timedelta(seconds=TIMEOUT_S)
    links = [
        CrewLink(make_mesh(dims, torch.device("cpu"), timeout), TIMEOUT_S)
        for dims in (ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(pp=2))
    ]
    rank = dist.get_rank()
    (follow if rank else lead)(*links)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(NOTES))
    os._exit(0)  # a group whose other member ended cannot be taken down in order


if __name__ == "__main__":
    main()
