"""Ranks of a sharded trainer publish their own slices; what is committed is the model that one process would hold."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rank_programs import RankPrograms
from safetensors.torch import load_file
from trainer_rank import VERSIONS, whole_state
from weightsync_stack import RESOURCE, Stack, equal_bits, eventually, running_stack

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version

pytestmark = pytest.mark.slow

DEADLINE_S = 280.0


async def published(
    programs: RankPrograms, stack: Stack, tmp_path: Path, layout: str, *, count: int, scenario: str
) -> list[list[dict[str, Any]]]:
    """What each rank noted; one that was killed noted nothing."""
    with programs.group(count, "trainer_rank", layout, stack.target, str(tmp_path), scenario) as processes:
        await asyncio.gather(*(asyncio.to_thread(process.wait, DEADLINE_S) for process in processes))
    notes = [tmp_path / f"{rank}.json" for rank in range(count)]
    return [json.loads(path.read_text()) if path.exists() else [] for path in notes]


async def manifest(stack: Stack, number: int) -> pb.Manifest:
    request = pb.GetManifestRequest(run=RESOURCE, version=Version(1, number).to_proto())
    return (await stack.sync.GetManifest(request, timeout=30)).manifest


async def check_newest(stack: Stack, number: int) -> None:
    """The Hugging Face directory of a version holds what one process would, bit for bit."""
    directory = stack.directory / f"v1.{number}"
    await eventually((directory / "manifest.json").exists)
    found = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    assert equal_bits(found, whole_state(number)[-1])


@pytest.mark.parametrize(("layout", "count"), [("fsdp", 4), ("tp", 2), ("both", 4)])
async def test_slices_of_all_ranks_become_the_whole_model(
    layout: str, count: int, tmp_path: Path, rank_programs: RankPrograms
) -> None:
    async with running_stack(tmp_path, dense_delay_s=0, keep=VERSIONS) as stack:
        notes = await published(rank_programs, stack, tmp_path, layout, count=count, scenario="all is well")
        assert all([note.get("kind") for note in rank] == ["anchor", "delta", "delta"] for rank in notes), notes
        assert all(rank == notes[0] for rank in notes), "every rank learns the same outcome"
        assert await stack.visible() == [Version(1, number) for number in range(VERSIONS, 0, -1)]
        for number in (1, VERSIONS):
            await check_newest(stack, number)
        shards = (await manifest(stack, VERSIONS)).shards
        assert [shard.name for shard in shards] == [f"rank-{rank:05d}" for rank in range(count)]
        anchor = await manifest(stack, 1)
        smallest, largest = (
            min(each.size_bytes for each in anchor.shards),
            max(each.size_bytes for each in anchor.shards),
        )
        assert largest < 2 * smallest, "no rank sends for the others"


async def test_a_failure_of_one_rank_is_one_of_all_and_the_next_version_is_an_anchor(
    tmp_path: Path, rank_programs: RankPrograms
) -> None:
    async with running_stack(tmp_path, dense_delay_s=0) as stack:
        notes = await published(rank_programs, stack, tmp_path, "fsdp", count=2, scenario="refuses")
        assert notes[0][1]["error"] == "ENCODE_FAILED"
        assert "complex64" in notes[1][1]["error"]
        assert [rank[2].get("kind") for rank in notes] == ["anchor", "anchor"]
        assert await stack.visible() == [Version(1, 3), Version(1, 1)]
        await check_newest(stack, 3)


async def test_a_killed_rank_ends_the_publication_of_the_others_and_nothing_is_committed(
    tmp_path: Path, rank_programs: RankPrograms
) -> None:
    async with running_stack(tmp_path, dense_delay_s=0) as stack:
        notes = await published(rank_programs, stack, tmp_path, "fsdp", count=2, scenario="dies")
        assert [note.get("error") for note in notes[0]] == [None, "RANK_LOST", "RANK_LOST"]
        assert notes[1] == []
        assert await stack.visible() == [Version(1, 1)]


async def test_ranks_at_different_versions_do_not_take_each_others_words(
    tmp_path: Path, rank_programs: RankPrograms
) -> None:
    async with running_stack(tmp_path, dense_delay_s=0) as stack:
        notes = await published(rank_programs, stack, tmp_path, "fsdp", count=2, scenario="interrupted")
        assert [note.get("error") for note in notes[0]] == [None, "RANK_LOST", "RANK_LOST"]
        assert [note.get("error") for note in notes[1]] == [None, "interrupted", "RANK_LOST"]
        assert await stack.visible() == [Version(1, 1)]


async def test_a_rank_that_says_nothing_ends_the_publication_at_its_deadline(
    tmp_path: Path, rank_programs: RankPrograms
) -> None:
    async with running_stack(tmp_path, dense_delay_s=0) as stack:
        notes = await published(rank_programs, stack, tmp_path, "fsdp", count=2, scenario="silent")
        assert [note.get("error") for note in notes[0]] == [None, "RANK_LOST", "RANK_LOST"]
        assert await stack.visible() == [Version(1, 1)]
