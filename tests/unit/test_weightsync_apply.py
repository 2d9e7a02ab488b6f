"""What happens when the engine does not take a version: once more, back to the one before, recover."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluice.versions import BASE, Version
from weightsync.receive.apply import Applier, ApplyError
from weightsync.staged import ApplyReport, StagedVersion

V1, V2 = Version(1, 1), Version(1, 2)


class EngineError(Exception):
    """What this engine raises."""


class Engine:
    """Takes versions except those that fail; remembers what it was asked to."""

    def __init__(self) -> None:
        self.failing: dict[Version, int] = {}
        self.hanging: set[Version] = set()
        self.asked: list[Version] = []
        self.recovered = 0

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        self.asked.append(staged.version)
        assert staged.path.exists()
        if staged.version in self.hanging:
            await asyncio.Event().wait()
        if self.failing.get(staged.version, 0) > 0:
            self.failing[staged.version] -= 1
            raise EngineError(f"no {staged.version}")
        return ApplyReport(staged.version, 0.001, 0.001)

    async def recover(self) -> Version:
        self.recovered += 1
        return BASE


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def applier(engine: Engine) -> Applier:
    return Applier(engine.apply, engine.recover, BASE, 0.2, (EngineError,))


def staged(tmp_path: Path, version: Version) -> StagedVersion:
    path = tmp_path / f"v{version}.safetensors"
    path.touch()
    return StagedVersion(version, path, {}, "")


async def test_the_file_of_the_version_in_service_stays_until_its_successor_serves(
    tmp_path: Path, applier: Applier
) -> None:
    first, second = staged(tmp_path, V1), staged(tmp_path, V2)
    await applier.apply(first)
    assert first.path.exists()
    await applier.apply(second)
    assert not first.path.exists()
    assert second.path.exists()
    assert applier.serving == V2


async def test_a_failure_is_tried_once_more(tmp_path: Path, engine: Engine, applier: Applier) -> None:
    engine.failing[V1] = 1
    await applier.apply(staged(tmp_path, V1))
    assert engine.asked == [V1, V1]
    assert applier.serving == V1


async def test_after_two_failures_the_version_before_is_applied_again(
    tmp_path: Path, engine: Engine, applier: Applier
) -> None:
    await applier.apply(staged(tmp_path, V1))
    engine.failing[V2] = 2
    with pytest.raises(ApplyError, match=r"no 1\.2"):
        await applier.apply(staged(tmp_path, V2))
    assert engine.asked == [V1, V2, V2, V1]
    assert applier.serving == V1
    assert engine.recovered == 0


async def test_an_engine_that_takes_neither_is_recovered(tmp_path: Path, engine: Engine, applier: Applier) -> None:
    await applier.apply(staged(tmp_path, V1))
    engine.failing = {V1: 1, V2: 2}
    with pytest.raises(ApplyError):
        await applier.apply(staged(tmp_path, V2))
    assert engine.recovered == 1
    assert applier.serving == BASE


async def test_an_engine_that_hangs_is_given_up_at_the_deadline(
    tmp_path: Path, engine: Engine, applier: Applier
) -> None:
    engine.hanging.add(V1)
    with pytest.raises(ApplyError, match="within"):
        await applier.apply(staged(tmp_path, V1))
    assert engine.recovered == 1


async def test_changes_by_other_means_wait_for_the_apply(tmp_path: Path, engine: Engine, applier: Applier) -> None:
    await applier.apply(staged(tmp_path, V1))
    assert await applier.run_exclusive(engine.recover) == BASE
    assert applier.serving == BASE
    assert not (tmp_path / "v1.1.safetensors").exists()
