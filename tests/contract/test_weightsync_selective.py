"""Receivers that pull only what their host's engine processes read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sparse_files import occupied
from weightsync_stack import RUN, Stack, eventually, following, running_stack

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.versions import Version
from weightsync.engine.coverage import Coverage
from weightsync.engine.selection import Ranges, Selection, scaled, total, union
from weightsync.publisher import WeightPublisher
from weightsync.receiver import ApplyReport, PolicyMode, PullLimits, StagedVersion, UpdateTimings, WeightReceiver

LIMITS = PullLimits(deadline_s=30, idle_s=5, attempts=3, first_pause_s=0.01, gap_bytes=0)
ROWS, COLUMNS, WHOLE, UNREAD = "cut.by_rows", "cut.by_columns", "whole.norm", "unread.head"


def weights(number: int) -> dict[str, torch.Tensor]:
    """Weights of which one in a hundred moves from version to version."""
    random = torch.Generator().manual_seed(0)
    tensors = {
        ROWS: torch.randn(512, 64, generator=random),
        COLUMNS: torch.randn(8, 32768, generator=random).bfloat16(),
        WHOLE: torch.randn(512, generator=random),
        UNREAD: torch.randn(256, 64, generator=random).half(),
    }
    for step in range(1, number + 1):
        generator = torch.Generator().manual_seed(step)
        for tensor in tensors.values():
            mask = torch.rand(tensor.shape, generator=generator) < 0.01
            tensor.copy_(torch.where(mask, tensor * 1.01, tensor))
    return tensors


def of_rank(rank: int) -> dict[str, Ranges]:
    """What one of two ranks reads; of the tensor that is not named, everything."""
    half = 512 * 64 // 2
    return {
        ROWS: ((rank * half, (rank + 1) * half),),
        COLUMNS: tuple(((2 * row + rank) << 14, (2 * row + rank + 1) << 14) for row in range(8)),
        UNREAD: (),
    }


@dataclass
class Engine:
    """Keeps where the version lies that it was told to load."""

    staged: list[StagedVersion] = field(default_factory=list)
    updates: list[UpdateTimings] = field(default_factory=list)

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        self.staged.append(staged)
        return ApplyReport(staged.version, 0.002, 0.001)

    async def at(self, version: Version) -> StagedVersion:
        await eventually(lambda: bool(self.staged) and self.staged[-1].version == version)
        await eventually(lambda: bool(self.updates) and self.updates[-1].version == version)
        return self.staged[-1]


@asynccontextmanager
async def receiving(
    stack: Stack,
    directory: Path,
    selection: Selection | None,
    *,
    local_files: bool = False,
    limits: PullLimits = LIMITS,
) -> AsyncIterator[tuple[Engine, WeightReceiver]]:
    engine = Engine()
    async with connect(stack.target, SecurityConfig()) as channel:
        receiver = WeightReceiver(
            channel,
            RUN,
            f"replica-{id(engine)}",
            directory,
            engine.apply,
            limits=limits,
            observe=engine.updates.append,
            local_files=local_files,
            selections=[] if selection is None else [selection],
        )
        async with following(receiver):
            yield engine, receiver


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path / "service", dense_delay_s=0) as running:
        yield running


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_holds(staged: StagedVersion, expected: Mapping[str, torch.Tensor], selection: Selection) -> None:
    """The selected bytes are those of the version, and the others are holes."""
    found = load_file(staged.path)
    assert found.keys() == staged.tensors.keys() == expected.keys()
    with safe_open(staged.path, framework="pt") as file:
        coverage = Coverage.parse(file.metadata())
    assert dict(coverage.partial) == {name: selection[name] for name in coverage.partial}
    assert coverage.partial.keys() == selection.keys()
    for name, tensor in expected.items():
        wanted, have = octets(tensor), octets(found[name])
        blank = bytearray(len(wanted))
        for begin, end in scaled(selection.get(name, ((0, tensor.numel()),)), tensor.itemsize):
            blank[begin:end] = wanted[begin:end]
        assert have == bytes(blank), name


def selected_bytes(selection: Selection) -> int:
    return sum(
        total(selection.get(name, ((0, tensor.numel()),))) * tensor.itemsize for name, tensor in weights(0).items()
    )


@pytest.mark.parametrize("local_files", [False, True], ids=["sockets", "files of the host"])
async def test_each_rank_pulls_its_own_part_and_holes_stay_holes(stack, tmp_path, local_files):
    await stack.publisher.push(Version(1, 1), weights(0), deadline_s=30)
    for rank in range(2):
        selection = of_rank(rank)
        async with receiving(stack, tmp_path, selection, local_files=local_files) as (engine, _):
            staged = await engine.at(Version(1, 1))
            assert_holds(staged, weights(0), selection)
            wanted = selected_bytes(selection)
            came = engine.updates[-1].local_bytes if local_files else engine.updates[-1].pulled_bytes
            assert wanted < came < wanted + 10_000, "the ranges and the header"
            whole = sum(tensor.nbytes for tensor in weights(0).values())
            assert occupied(staged.path) < 0.6 * whole < staged.path.stat().st_size


async def test_deltas_are_applied_where_the_file_has_something(stack, tmp_path):
    publisher = WeightPublisher(stack.channel, RUN, chunk_bytes=1000)
    selection = of_rank(1)
    async with receiving(stack, tmp_path, selection) as (engine, _):
        for number in range(1, 5):
            await publisher.update(Version(1, number), weights(number), deadline_s=30)
            staged = await engine.at(Version(1, number))
            assert_holds(staged, weights(number), selection)
            assert occupied(staged.path) < 0.6 * staged.path.stat().st_size
        assert engine.updates[-1].pulled_bytes < 20_000, "it took the delta"


async def test_a_late_joiner_takes_parts_of_a_dense_form_and_the_deltas_behind_it(tmp_path):
    async with running_stack(tmp_path / "service", dense_delay_s=3600) as stack:
        publisher = WeightPublisher(stack.channel, RUN, chunk_bytes=1000)
        for number in range(1, 4):
            await publisher.update(Version(1, number), weights(number), deadline_s=30)
        selection = of_rank(0)
        async with receiving(stack, tmp_path, selection) as (engine, _):
            assert_holds(await engine.at(Version(1, 3)), weights(3), selection)


async def test_receivers_that_read_other_parts_do_not_share_a_file(stack, tmp_path):
    await stack.publisher.push(Version(1, 1), weights(0), deadline_s=30)
    async with (
        receiving(stack, tmp_path, of_rank(0)) as (one, _),
        receiving(stack, tmp_path, of_rank(1)) as (other, _),
        receiving(stack, tmp_path, of_rank(1)) as (same, _),
        receiving(stack, tmp_path, None) as (whole, _),
    ):
        version = Version(1, 1)
        paths = [(await engine.at(version)).path for engine in (one, other, same, whole)]
        assert len(set(paths)) == 3
        assert paths[1] == paths[2]
        assert_holds(whole.staged[-1], weights(0), {})


async def test_ranges_near_each_other_come_together_and_count_as_there(stack, tmp_path):
    await stack.publisher.push(Version(1, 1), weights(0), deadline_s=30)
    near = PullLimits(deadline_s=30, idle_s=5, attempts=3, first_pause_s=0.01, gap_bytes=1 << 15)
    async with receiving(stack, tmp_path, of_rank(0), limits=near) as (engine, _):
        staged = await engine.at(Version(1, 1))
        with safe_open(staged.path, framework="pt") as file:
            partial = Coverage.parse(file.metadata()).partial
        assert COLUMNS not in partial or total(partial[COLUMNS]) == (8 << 15) - (1 << 14)
        assert partial[UNREAD] == ()


async def test_holding_and_returning_to_a_version_works_in_parts_too(stack, tmp_path):
    publisher = WeightPublisher(stack.channel, RUN, chunk_bytes=1000)
    selection = of_rank(0)
    for number in (1, 2):
        await publisher.update(Version(1, number), weights(number), deadline_s=30)
    async with receiving(stack, tmp_path, selection) as (engine, receiver):
        await engine.at(Version(1, 2))
        receiver.set_policy(PolicyMode.HOLD, owner="eval", ttl_s=60)
        await receiver.update_to(Version(1, 1), 30, owner="eval")
        assert_holds(await engine.at(Version(1, 1)), weights(1), selection)


async def test_processes_that_together_read_everything_share_the_whole_file(stack, tmp_path):
    await stack.publisher.push(Version(1, 1), weights(0), deadline_s=30)
    both = {**union([of_rank(0), of_rank(1)]), UNREAD: ((0, 256 * 64),)}
    async with (
        receiving(stack, tmp_path, both) as (one, _),
        receiving(stack, tmp_path, None) as (other, _),
    ):
        version = Version(1, 1)
        assert (await one.at(version)).path == (await other.at(version)).path
        assert_holds(one.staged[-1], weights(0), {})
