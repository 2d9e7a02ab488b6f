"""Faults that are more than a kill: no room, bits turned over, a service that stands still, a neighbour that dies."""

from __future__ import annotations

import itertools
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sluice.versions import Version
from weight_faults.points import Point
from weight_faults.process import ATTEMPTS, DEADLINE_S, SILENCE_S, Program
from weight_faults.versions import DENSE_BYTES
from weight_faults.world import World, eventually, expect, rubbish

__all__ = ["DAMAGES", "Damage"]

_NO_ROOM_BYTES = 64 << 10
"""Longest file while there is "no room": enough for a delta and a log, not for a dense form."""

_PATIENCE_S = 5.0
"""Seconds without a sign of life after which an engine whose bytes were damaged opens a stream again."""

_NEXT_S = 1.0
"""Seconds until a trainer publishes the next version."""

_REFUSED_S = 10.0
"""Deadline of a push that the service refuses as long as there is no room: the trainer repeats it until then."""

_SILENCE_S = 2.0
"""Seconds without a sign of life after which an engine opens a stream again, where that is what it has to do."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One fault.

    Attributes:
        phase: What breaks.
        victim: Where.
        play: Does it to a world in which version 1.2 serves; returns the seconds from the end of the fault to the next
            version in service.
        wired: Programs between which and the service there is a wire that can be damaged.
        form: Which form is hit.
        silence_s: Seconds without a sign of life after which an engine opens a stream again.
        attempts: Pulls of the same bytes after which an engine gives up: few where no service is ever away.
    """

    phase: str
    victim: str
    play: Callable[[World], float]
    wired: tuple[str, ...] = ()
    form: str = "delta"
    silence_s: float = SILENCE_S
    attempts: int = ATTEMPTS

    @property
    def id(self) -> str:
        """Name of the cell."""
        return f"{self.victim}-{self.phase}"


def _disk_full(world: World) -> float:
    """A push of whole tensors finds no room, the version before serves on; later there is room."""
    version = _new_trainer(world)
    _limit_files(world.service, _NO_ROOM_BYTES)
    answer = world.try_push(version, _REFUSED_S)
    expect(answer.get("code") == "RESOURCE_EXHAUSTED", f"a full disk was answered by {answer}")
    _expect_untouched(world)
    eventually(lambda: not rubbish(world.store("service")), "what came in of a refused push stays")
    _limit_files(world.service, resource.RLIM_INFINITY)
    return _finish(world, version)


def _disk_full_behind(world: World) -> float:
    """There is room for deltas and none for the dense form behind them: it is made later, and versions come through."""
    _limit_files(world.service, _NO_ROOM_BYTES)
    world.deliver(Version(1, 3))
    expect("1.3" not in " ".join(map(str, world.observer.loaded)), "a dense form was written without room")
    _limit_files(world.service, resource.RLIM_INFINITY)
    began = time.monotonic()
    world.observer.await_loaded(Version(1, 3), DEADLINE_S)
    seconds = time.monotonic() - began
    _finish(world, Version(1, 4))
    return seconds


def _over_budget(world: World) -> float:
    """Whole tensors that pass the configured bytes are refused, the version before serves on."""
    _set_max_bytes(world, 3 * DENSE_BYTES // 2)
    version = _new_trainer(world)
    answer = world.try_push(version, _REFUSED_S)
    expect(answer.get("code") == "RESOURCE_EXHAUSTED", f"a push beyond max_bytes was answered by {answer}")
    _expect_untouched(world)
    world.given_up.add(Version(1, 1))  # what nobody needs gives way before a push is refused
    _set_max_bytes(world, None)
    return _finish(world, version)


def _memory_full(world: World) -> float:
    """No room to stage: the version before serves on, and the new one is taken when there is room, unasked."""
    _limit_files(world.engine, _NO_ROOM_BYTES)
    world.push(Version(1, 3))
    eventually(lambda: bool(world.engine.ask("status")["error"]), "the engine does not say that it has no room")
    _expect_untouched(world)
    _limit_files(world.engine, resource.RLIM_INFINITY)
    return _finish(world, Version(1, 3))


def _damaged_push(world: World) -> float:
    """A bit turns over between trainer and service: the push is repeated, the version is right."""
    world.wires["trainer"].damage_next()
    seconds = _finish(world, Version(1, 3))
    expect(world.wires["trainer"].damaged.is_set(), "nothing was damaged")
    return seconds


def _damaged_pull(world: World) -> float:
    """A bit turns over between service and engine: the bytes are pulled again, the version is right."""
    world.wires["engine"].damage_next()
    seconds = _finish(world, Version(1, 3))
    expect(world.wires["engine"].damaged.is_set(), "nothing was damaged")
    return seconds


def _damaged_delta_file(world: World) -> float:
    """A committed delta rots before anybody read it: nobody applies it, and whole tensors come soon."""
    lost = Version(1, 3)
    world.service.arm(Point("weightsync.service.runs:Run.add_version"), halt=True)
    pushing = world.push_later(lost)
    expect(world.service.reached.wait(DEADLINE_S), "the service did not come to publish")
    (file,) = (world.store("service") / ".deltas" / f"v{lost}").glob("*.safetensors")
    _flip(file)
    world.service.ask("go_on")
    pushing.result(DEADLINE_S)
    eventually(lambda: bool(world.engine.ask("status")["error"]), "the engine does not say what it found")
    _expect_untouched(world)
    return _finish_somehow(world, lost)


def _damaged_dense_file(world: World) -> float:
    """The newest dense form rots: an engine that comes then refuses it, and whole tensors come soon."""
    lost = Version(1, 2)
    world.engine.kill()
    _flip(world.store("service") / f"v{lost}" / "model.safetensors")
    world.restart(world.engine)
    eventually(lambda: bool(world.engine.ask("status")["error"]), "the engine does not say what it found")
    return _finish_somehow(world, lost)


def _damaged_base(world: World) -> float:
    """The engine's base copy rots: the delta gives other bytes than announced, and the dense way is taken."""
    (file,) = world.stage_dir.glob("*/*.safetensors")
    _flip(file)
    world.deliver(Version(1, 3))
    expect(world.engine.ask("status")["fallbacks"] >= 1, "the engine did not notice its damaged base")
    return _finish(world, Version(1, 4))


def _dead_builder(world: World) -> float:
    """An engine dies while it stages a version that a neighbour on its host waits for: the neighbour stages it itself."""
    neighbour = world.add_engine("neighbour")
    eventually(lambda: neighbour.ask("probe").get("version") == "1.2", "the neighbour does not serve")
    # Whoever begins waits at the first byte until the other one has found the version being made.
    engines = (world.engine, neighbour)
    for engine in engines:
        engine.arm(Point("weightsync.format.chunks:read_pull_response"), halt=True)
    world.push(Version(1, 3))
    eventually(lambda: any(engine.reached.is_set() for engine in engines), "nobody stages the version")
    builder, other = engines if world.engine.reached.is_set() else engines[::-1]
    builder.kill()
    began = time.monotonic()
    expect(other.reached.wait(DEADLINE_S), "the neighbour does not go on")
    other.ask("go_on")
    eventually(lambda: other.ask("probe").get("version") == "1.3", "the neighbour does not serve the version")
    seconds = time.monotonic() - began
    builder.start()
    builder.await_ready()
    eventually(lambda: builder.ask("probe").get("version") == "1.3", "the engine does not come back")
    neighbour.signal(signal.SIGTERM)
    neighbour.await_death()
    _finish(world, Version(1, 3))
    return seconds


def _standstill(world: World) -> float:
    """A service that stands still ends nobody's patience: the push ends at its deadline, the version before serves on."""
    world.service.signal(signal.SIGSTOP)
    answer = world.try_push(Version(1, 3), 1.0)
    expect(answer.get("code") == "DEADLINE_EXCEEDED", f"a service that stands still was answered by {answer}")
    eventually(lambda: not world.engine.ask("status")["connected"], "the engine does not notice the silence")
    _expect_untouched(world)
    world.service.signal(signal.SIGCONT)
    return _finish(world, Version(1, 3))


def _standstill_in_pull(world: World) -> float:
    """A service that stands still in the midst of a pull is waited for no longer than a chunk may take."""
    world.service.arm(Point("weightsync.service.servicer:_read_chunk", nth=3), halt=True)
    world.push(Version(1, 3))
    expect(world.service.reached.wait(DEADLINE_S), "the service did not come to the pull")
    world.service.signal(signal.SIGSTOP)
    eventually(lambda: not world.engine.ask("status")["connected"], "the engine does not notice the silence")
    _expect_untouched(world)
    world.service.signal(signal.SIGCONT)
    world.service.ask("go_on")
    return _finish(world, Version(1, 3))


def _repeated_commit(world: World) -> float:
    """A trainer that died after its commit publishes the same version again, whole: it is found, and nothing changes."""
    version = Version(1, 2)
    world.trainer.kill()
    world.trainer.start()
    world.trainer.await_ready()
    answer = world.push(version)
    expect(answer["duplicate"], "a version that was committed before was taken as a new one")
    return _finish(world, Version(1, 3))


DAMAGES = (
    Damage("disk_full", "service", _disk_full, form="anchor"),
    Damage("disk_full_behind", "service", _disk_full_behind),
    Damage("over_budget", "service", _over_budget, form="anchor"),
    Damage("memory_full", "engine", _memory_full),
    Damage("damaged_push", "trainer", _damaged_push, wired=("trainer",)),
    Damage("damaged_pull", "engine", _damaged_pull, wired=("engine",), silence_s=_PATIENCE_S),
    Damage("damaged_delta_file", "service", _damaged_delta_file, attempts=3),
    Damage("damaged_dense_file", "service", _damaged_dense_file),
    Damage("damaged_base", "engine", _damaged_base),
    Damage("dead_builder", "engine", _dead_builder),
    Damage("standstill", "service", _standstill, silence_s=_SILENCE_S),
    Damage("standstill_in_pull", "service", _standstill_in_pull, silence_s=_SILENCE_S),
    Damage("repeated_commit", "trainer", _repeated_commit, form="anchor"),
)
"""Every such fault."""


def _finish(world: World, version: Version) -> float:
    """Bring a version into service and another one behind it, and check everything."""
    began = time.monotonic()
    if version not in world.acknowledged:
        world.push(version)
    world.await_served(version)
    seconds = time.monotonic() - began
    newest = Version(version.epoch, version.number + 1)
    world.deliver(newest)
    world.check(newest)
    return seconds


def _finish_somehow(world: World, lost: Version) -> float:
    """Publish on until a version comes through: a delta on what is lost may be taken before anybody notices."""
    began = time.monotonic()
    served = len(world.observer.served)
    for number in itertools.count(lost.number + 1):
        world.push(Version(lost.epoch, number))
        version = world.observer.served_after(lost, _NEXT_S)
        if version is not None:
            break
        if time.monotonic() > began + DEADLINE_S:
            raise TimeoutError(f"no version came through until {Version(lost.epoch, number)}")
    seconds = time.monotonic() - began
    expect(lost not in world.observer.served[served:], f"{lost} was served after it was lost")
    world.given_up |= {each for each in world.acknowledged if lost <= each < version}
    newest = Version(lost.epoch, number + 1)
    world.deliver(newest)
    world.check(newest)
    return seconds


def _new_trainer(world: World) -> Version:
    """Start the trainer again, which sends whole tensors next; the version that it would send."""
    world.trainer.kill()
    world.restart(world.trainer)
    return Version(world.epoch, 3)


def _expect_untouched(world: World) -> None:
    """The version before serves on, now: asked once more, not remembered."""
    answer = world.engine.ask("probe")
    expect(answer.get("version") == "1.2", f"the engine answers {answer} instead of version 1.2")


def _set_max_bytes(world: World, most: int | None) -> None:
    world.service.settings["config"]["max_bytes"] = most
    world.service.kill()
    world.restart(world.service)


def _limit_files(program: Program, longest: int) -> None:
    """Bound the files that a process writes: to it this is a full disk, and nobody else notices."""
    _, hard = resource.prlimit(program.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (longest, hard))


def _flip(path: Path) -> None:
    """Turn over a bit of a file's data, three quarters into it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size * 3 // 4)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
