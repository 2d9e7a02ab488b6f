"""One rank of a trainer without a service, as a program: trains batches, runs out of memory where it is said, notes what it saw.

Arguments: directory with `model`, the epoch, and where rank 1 runs out of memory in batch 2: `forward`, `backward`, `optimizer` or
`nowhere`. Rank, count and meeting point come from the environment, as torchrun gives them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from short_memory import run_out
from small_learner import batch
from tiny_policy import ragged_batch

from sluice.config import CommonConfig
from sluice.rpc import SluiceError
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.out_of_memory import MemoryShortError
from trainer_svc.parallel.mesh import join
from trainer_svc.service.learner import FollowingRank, Learner
from trainer_svc.service.rank_group import RankFailedError, RankGroup, RankLink

TIMEOUT_S = 250.0
"""Limit in seconds for a collective, or for the answer to a command."""
POLL_S = 0.02
BATCHES = 4
STEPS = 4
"""Optimizer steps of a batch."""


def say_ahead(engine: TrainEngine, place: str, said: Path) -> None:
    """Let rank 0 write a file in batch 2 when nothing but collectives lies between it and the place at which rank 1 fails."""

    def say(*_: object) -> None:
        if engine.optimizer_steps >= STEPS:
            said.touch()

    if place != "optimizer":
        engine.network.model.base_model.norm.register_forward_hook(say)
        return
    part = engine.optimizer.parts[-1]
    step = part.step

    def step_and_say() -> None:
        step()
        say()

    part.step = step_and_say


def is_behind(engine: TrainEngine, said: Path) -> bool:
    """Return whether batch 2 is trained, and then wait until rank 0 is ahead."""
    if engine.optimizer_steps < STEPS:
        return False
    give_up = time.monotonic() + TIMEOUT_S
    while not said.exists():
        assert time.monotonic() < give_up, "rank 0 does not come to the place"
        time.sleep(POLL_S)
    return True


def lead(learner: Learner, epoch: int, place: str, said: Path) -> dict[str, object]:
    learner.load()
    say_ahead(learner.engine, place, said)
    notes: dict[str, object] = {"begun": learner.restore(epoch, "").version.number}
    losses: dict[int, float] = {}
    halved: list[int] = []
    for number in range(learner.version.number + 1, BATCHES + 1):
        try:
            applied = learner.apply(batch(learner, number, ragged_batch(seed=number)))
        except SluiceError as error:
            return notes | {"losses": losses, "failed": f"{error.reason} {error.message}"}
        assert applied.metrics is not None
        losses[number] = applied.metrics.loss
        halved += [number] if "token_budget_halved" in applied.metrics.measured else []
        if number in {1, BATCHES}:
            learner.begin_save(0).result(TIMEOUT_S)
    assert learner.ranks is not None
    learner.ranks.stop_others(0)
    return notes | {"losses": losses, "halved": halved, "steps": learner.optimizer_steps}


def main() -> None:
    directory, epoch, place = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    settings = {"token_budget": 160, "epochs": 2, "minibatches": 2, "parallel": {"dp_shard": 2, "timeout_s": TIMEOUT_S}}
    config = TrainerConfig(lr=1e-2, warmup_steps=3, device="cpu", threads=1, **settings)
    common = CommonConfig(run="test", output_dir=directory / "outputs", model=str(directory / "model"))
    mesh = join(config.parallel, "cpu")
    link = RankLink(mesh, TIMEOUT_S)
    said = directory / f"ahead.{epoch}"
    if mesh.rank == 0:
        notes = lead(Learner(common, config, mesh, RankGroup(link)), epoch, place, said)
        (directory / f"notes.{epoch}.json").write_text(json.dumps(notes))
        os._exit("failed" in notes)
    learner = Learner(common, config, mesh)
    load = learner.load

    def load_and_watch() -> None:
        load()
        if place != "nowhere":
            run_out(learner.engine, place, lambda: is_behind(learner.engine, said))

    learner.load = load_and_watch
    code = 0
    try:
        with contextlib.suppress(RankFailedError):  # rank 0 may end before this rank has read its last command
            FollowingRank(learner, link, None)._compute()
    except MemoryShortError:
        code = 1
    os._exit(code)  # a group whose member ended cannot be taken down in order


if __name__ == "__main__":
    main()
