"""Runs cells of the matrix: kill, restart, and see that every version is whole, kept and right."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.versions import Version
from weight_faults.cells import Cell
from weight_faults.damage import Damage
from weight_faults.process import DEADLINE_S, GoneError
from weight_faults.world import World, eventually, expect

__all__ = ["CellResult", "run_cell", "run_matrix"]


@dataclass(frozen=True, slots=True)
class CellResult:
    """What became of one fault.

    Attributes:
        phase: Where on a version's way it happened.
        victim: Who was killed.
        form: "delta" or "anchor".
        ok: Whether everything held.
        recovery_s: Seconds from the kill until the engine served the version, or the one that took its place, and a service that
            was killed gave it out; restart included.
        detail: What did not hold; empty if everything did.
    """

    phase: str
    victim: str
    form: str
    ok: bool
    recovery_s: float
    detail: str


def run_matrix(cells: Iterable[Cell | Damage], work_dir: Path) -> list[CellResult]:
    """Run cells one after the other, each in a directory of its own below `work_dir`."""
    return [run_cell(cell, work_dir / cell.id) for cell in cells]


def run_cell(cell: Cell | Damage, directory: Path) -> CellResult:
    """Do what the cell says to a world of its own, end the fault, and check everything that must hold."""
    directory.mkdir(parents=True)
    try:
        recovery_s = _damage(cell, directory) if isinstance(cell, Damage) else _kill_and_recover(cell, directory)
    except (AssertionError, TimeoutError, GoneError) as error:
        return CellResult(cell.phase, cell.victim, cell.form, False, 0.0, f"{error}; logs are in {directory}")
    return CellResult(cell.phase, cell.victim, cell.form, True, recovery_s, "")


def _damage(cell: Damage, directory: Path) -> float:
    with World(directory, wired=cell.wired, silence_s=cell.silence_s, attempts=cell.attempts) as world:
        _begin_chain(world)
        return cell.play(world)


def _kill_and_recover(cell: Cell, directory: Path) -> float:
    with World(directory, relay=cell.relay, local_files=cell.local_files) as world:
        return _recover(cell, world)


def _begin_chain(world: World) -> None:
    """An anchor and a delta, both in service, and the delta's dense form: what is made next belongs to the third version."""
    world.deliver(Version(1, 1))
    kind = world.deliver(Version(1, 2))["kind"]
    expect(kind == "delta", f"the second version went out as {kind}")
    world.observer.await_loaded(Version(1, 2), DEADLINE_S)


def _recover(cell: Cell, world: World) -> float:
    number = 1
    if cell.form == "delta":
        _begin_chain(world)
        number = 3
    pushing = _kill(cell, world, Version(1, number))
    killed_at = time.monotonic()
    world.restart(world.program(cell.victim))
    version = Version(world.epoch, number)
    if cell.victim == "trainer":
        _expect_gone(pushing)
        world.push(version)
    else:
        pushing.result(DEADLINE_S)
    world.await_served(version)
    if cell.victim in {"service", "relay"}:  # of use again, also where the engine needed it no more
        eventually(lambda: version in world.visible(cell.victim), f"{cell.victim} does not give out {version}")
    recovery_s = time.monotonic() - killed_at
    newest = Version(world.epoch, number + 1)
    world.deliver(newest)
    world.check(newest)
    return recovery_s


def _kill(cell: Cell, world: World, version: Version) -> Future[dict[str, Any]]:
    """Send a version on its way and kill the victim at the point; the push goes on where the trainer lives."""
    victim = world.program(cell.victim)
    place = world.program(cell.at or cell.victim)
    place.arm(cell.point, halt=place is not victim)
    pushing = world.push_later(version)
    if place is victim:
        victim.await_death()
        expect(victim.killed, f"{victim.name} ended by itself")
    else:
        if not place.reached.wait(DEADLINE_S):
            raise TimeoutError(f"{place.name} did not come to {cell.point.target}")
        victim.kill()
        place.ask("go_on")
    return pushing


def _expect_gone(pushing: Future[dict[str, Any]]) -> None:
    """The trainer's death ends its push, unless the version was through before."""
    try:
        pushing.result(DEADLINE_S)
    except GoneError:
        return
