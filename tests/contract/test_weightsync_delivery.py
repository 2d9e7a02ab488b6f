"""WatchVersions, PullWeights, ReportVersion, retention, and what a restart of the service leaves."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from simulated_clock import SimulatedClock
from small_models import VOCABULARY, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from weightsync_stack import (
    RESOURCE,
    RUN,
    ShardSource,
    Stack,
    equal_bits,
    error_of,
    eventually,
    manifest_of,
    read_source,
    running_stack,
    weights,
)

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.chunks import MAX_CHUNK_BYTES, ChunkError, check_chunk
from weightsync.publisher import WeightPublisher
from weightsync.service.store import read_form

TIMEOUT_S = 60.0
REFUSED_S = 3.0
"""Deadline of a push that is refused, and repeated until then."""

LEASE_S = 30.0
HEARTBEAT_S = 5.0


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest_asyncio.fixture
async def stack(tmp_path: Path, clock: SimulatedClock) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path, clock=clock, heartbeat_s=HEARTBEAT_S) as running:
        yield running


async def push(stack: Stack, *numbers: int, epoch: int = 1) -> None:
    for number in numbers:
        await stack.push(Version(epoch, number), weights(number), deadline_s=TIMEOUT_S)


async def announced(stack: Stack, known: Version | None = None) -> AsyncIterator[Version | None]:
    """What a watcher hears; None is a sign of life."""
    request = pb.WatchVersionsRequest(run=RESOURCE, replica="r", known=None if known is None else known.to_proto())
    async for response in stack.delivery.WatchVersions(request, timeout=TIMEOUT_S):
        yield Version.from_proto(response.manifest.version) if response.HasField("manifest") else None


async def test_a_watcher_gets_the_newest_at_once_and_then_each_newer_one(stack: Stack) -> None:
    await push(stack, 1, 2)
    heard = announced(stack)
    assert await anext(heard) == Version(1, 2)
    await push(stack, 3)
    assert [version async for version in _first(heard, 1)] == [Version(1, 3)]
    await push(stack, 0, epoch=2)
    assert [version async for version in _first(heard, 1)] == [Version(2, 0)]


async def _first(heard: AsyncIterator[Version | None], count: int) -> AsyncIterator[Version]:
    """The next announcements, signs of life left out."""
    while count:
        version = await anext(heard)
        if version is not None:
            count -= 1
            yield version


async def test_a_watcher_hears_nothing_that_it_knows_but_signs_of_life(stack: Stack, clock: SimulatedClock) -> None:
    await push(stack, 1)
    heard = announced(stack, known=Version(1, 1))
    assert await anext(heard) is None
    for _ in range(2):
        sign = asyncio.ensure_future(anext(heard))
        await clock.until(sign.done, step_s=HEARTBEAT_S)
        assert sign.result() is None


async def test_a_watcher_may_come_before_the_first_version(stack: Stack) -> None:
    heard = announced(stack)
    assert await anext(heard) is None
    await push(stack, 1)
    assert [version async for version in _first(heard, 1)] == [Version(1, 1)]


async def test_a_pull_gives_the_file_from_any_offset(stack: Stack) -> None:
    await push(stack, 1)
    source = ShardSource("model", weights(1))
    whole = read_source(source, 0, source.size)
    assert await stack.pull(Version(1, 1)) == whole
    assert await stack.pull(Version(1, 1), offset=777) == whole[777:]
    assert await stack.pull(Version(1, 1), offset=777, length=100) == whole[777:877]
    assert await stack.pull(Version(1, 1), offset=source.size) == b""


async def test_a_pull_from_the_midst_of_a_chunk_gives_the_rest_whole(stack: Stack) -> None:
    tensors = {"w": torch.randn(3 << 18)}
    publisher = WeightPublisher(stack.channel, RUN)
    await publisher.update(Version(1, 1), tensors, deadline_s=TIMEOUT_S)
    source = ShardSource("model", tensors)
    for offset in (0, 1, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 5):
        request = pb.PullWeightsRequest(
            run=RESOURCE, version=Version(1, 1).to_proto(), shard="model", offset=offset, length=2_000_000
        )
        received = b""
        async for response in stack.delivery.PullWeights(request, timeout=TIMEOUT_S):
            received += check_chunk(response.chunk)
        assert received == read_source(source, offset, offset + 2_000_000)


async def test_what_the_disk_damages_after_the_push_shows_in_the_checksum(stack: Stack) -> None:
    await WeightPublisher(stack.channel, RUN).update(Version(1, 1), weights(), deadline_s=TIMEOUT_S)
    path = stack.directory / "v1.1" / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    request = pb.PullWeightsRequest(run=RESOURCE, version=Version(1, 1).to_proto(), shard="model")
    response = await stack.delivery.PullWeights(request, timeout=TIMEOUT_S).read()
    with pytest.raises(ChunkError):
        check_chunk(response.chunk)


@pytest.mark.parametrize(
    ("number", "shard", "offset", "code"),
    [
        (9, "model", 0, grpc.StatusCode.NOT_FOUND),
        (1, "other", 0, grpc.StatusCode.NOT_FOUND),
        (1, "../v1.1/model", 0, grpc.StatusCode.NOT_FOUND),
        (1, "model", 1 << 40, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_is_not_there_cannot_be_pulled(
    stack: Stack, number: int, shard: str, offset: int, code: grpc.StatusCode
) -> None:
    await push(stack, 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.pull(Version(1, number), shard, offset)
    assert caught.value.code() is code


async def report(stack: Stack, replica: str, version: Version) -> pb.ReportVersionResponse:
    request = pb.ReportVersionRequest(
        run=RESOURCE, replica=replica, version=version.to_proto(), phase=pb.REPLICA_PHASE_SERVING
    )
    return await stack.delivery.ReportVersion(request, timeout=TIMEOUT_S)


def directories(stack: Stack) -> set[str]:
    return {path.name for path in stack.directory.glob("v*")}


async def test_the_last_versions_are_kept_and_those_that_replicas_serve(tmp_path: Path) -> None:
    async with running_stack(tmp_path, keep=2) as stack:
        await push(stack, 1)
        response = await report(stack, "slow", Version(1, 1))
        assert response.lease.ToTimedelta().total_seconds() == 60
        await push(stack, 2, 3, 4)
        await eventually(lambda: directories(stack) == {"v1.1", "v1.3", "v1.4"})
        assert await stack.visible() == [Version(1, 4), Version(1, 3), Version(1, 1)]
        await report(stack, "slow", Version(1, 4))
        await push(stack, 5)
        await eventually(lambda: directories(stack) == {"v1.4", "v1.5"})
        assert await stack.visible() == [Version(1, 5), Version(1, 4)]


async def replicas(stack: Stack) -> list[tuple[str, Version]]:
    """What the service lists: live replicas and what they serve."""
    listed = await stack.sync.ListVersions(pb.ListVersionsRequest(run=RESOURCE), timeout=TIMEOUT_S)
    return [(each.replica, Version.from_proto(each.version)) for each in listed.replicas]


async def test_replicas_are_listed_while_their_lease_lasts(tmp_path: Path, clock: SimulatedClock) -> None:
    async with running_stack(tmp_path, clock=clock, lease_s=LEASE_S) as stack:
        await push(stack, 1)
        await report(stack, "a", Version(1, 1))
        assert await replicas(stack) == [("a", Version(1, 1))]
        await clock.advance(LEASE_S - 1)
        assert await replicas(stack) == [("a", Version(1, 1))]
        await clock.advance(1)
        assert await replicas(stack) == []


async def test_replicas_beyond_the_limit_are_refused_until_a_lease_ends(tmp_path: Path, clock: SimulatedClock) -> None:
    async with running_stack(tmp_path, clock=clock, lease_s=LEASE_S, max_replicas=2) as stack:
        await push(stack, 1)
        for name in ("a", "b", "a"):
            await report(stack, name, Version(1, 1))
        for waited_s in (0, LEASE_S - 1):
            await clock.advance(waited_s)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await report(stack, "c", Version(1, 1))
            assert error_of(caught.value).reason == "TOO_MANY_REPLICAS"
        await clock.advance(1)
        await report(stack, "c", Version(1, 1))
        assert await replicas(stack) == [("c", Version(1, 1))]


async def test_a_listing_says_how_far_replicas_are_behind_and_what_updates_cost_them(stack: Stack) -> None:
    await push(stack, 1, 2, 3)
    timings = pb.UpdateTimings(pulled_bytes=7)
    request = pb.ReportVersionRequest(
        run=RESOURCE, replica="a", version=Version(1, 1).to_proto(), phase=pb.REPLICA_PHASE_SERVING, timings=timings
    )
    await stack.delivery.ReportVersion(request, timeout=TIMEOUT_S)
    await report(stack, "a", Version(1, 1))  # renews the lease and says nothing new
    await report(stack, "b", Version(1, 3))
    listed = await stack.sync.ListVersions(pb.ListVersionsRequest(run=RESOURCE), timeout=TIMEOUT_S)
    assert [(each.replica, each.versions_behind) for each in listed.replicas] == [("a", 2), ("b", 0)]
    assert listed.replicas[0].timings == timings
    assert not listed.replicas[1].HasField("timings")


async def test_only_what_nobody_needs_can_be_deleted(stack: Stack) -> None:
    await push(stack, 1, 2)
    await report(stack, "a", Version(1, 1))
    for number in (1, 2):
        request = pb.DeleteVersionRequest(run=RESOURCE, version=Version(1, number).to_proto())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.sync.DeleteVersion(request, timeout=TIMEOUT_S)
        assert error_of(caught.value).reason == "IN_USE"
    await report(stack, "a", Version(1, 2))
    for _ in range(2):
        request = pb.DeleteVersionRequest(run=RESOURCE, version=Version(1, 1).to_proto())
        await stack.sync.DeleteVersion(request, timeout=TIMEOUT_S)
    assert await stack.visible() == [Version(1, 2)]


async def test_versions_are_listed_in_pages(stack: Stack) -> None:
    await push(stack, 1, 2, 3)
    seen, token = [], ""
    while True:
        page = await stack.sync.ListVersions(
            pb.ListVersionsRequest(run=RESOURCE, page_size=2, page_token=token), timeout=TIMEOUT_S
        )
        seen += [each.version.number for each in page.versions]
        token = page.next_page_token
        if not token:
            break
    assert seen == [3, 2, 1]


async def test_runs_are_kept_apart(stack: Stack) -> None:
    await push(stack, 1)
    await WeightPublisher(stack.channel, "other").update(Version(1, 5), weights(5), deadline_s=TIMEOUT_S)
    other = await stack.sync.ListVersions(pb.ListVersionsRequest(run="runs/other"), timeout=TIMEOUT_S)
    assert [Version.from_proto(each.version) for each in other.versions] == [Version(1, 5)]
    assert await stack.visible() == [Version(1, 1)]


async def test_a_full_disk_refuses_the_push_and_the_old_version_stays(tmp_path: Path) -> None:
    size = ShardSource("model", weights()).size
    async with running_stack(tmp_path, max_bytes=int(2.5 * size)) as stack:
        await push(stack, 1, 2)
        await push(stack, 3)  # in place of 1, which nobody needs
        assert await stack.visible() == [Version(1, 3), Version(1, 2)]
        await report(stack, "a", Version(1, 2))
        with pytest.raises(SluiceError) as caught:
            await stack.push(Version(1, 4), weights(4), deadline_s=REFUSED_S)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_s
        source = ShardSource("model", weights(3))
        assert await stack.pull(Version(1, 3)) == read_source(source, 0, source.size)


async def test_a_restart_finds_what_was_committed_and_sweeps_the_rest_away(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        await push(stack, 1, 2)
        await stack.push_shard(ShardSource("model", weights(3)), Version(1, 3), until=2000)
        digest = (await stack.sync.GetManifest(pb.GetManifestRequest(run=RESOURCE), timeout=TIMEOUT_S)).manifest.digest
    (stack.directory / "v1.1" / "manifest.json").unlink()
    async with running_stack(tmp_path) as stack:
        assert await stack.visible() == [Version(1, 2)]
        assert not (stack.directory / ".incoming").exists()
        assert not (stack.directory / "v1.1").exists()
        found = await stack.sync.GetManifest(pb.GetManifestRequest(run=RESOURCE), timeout=TIMEOUT_S)
        assert found.manifest.digest == digest
        await push(stack, 3)


async def test_a_disk_that_cannot_be_read_for_now_costs_no_version(tmp_path: Path, monkeypatch) -> None:
    async with running_stack(tmp_path) as stack:
        await push(stack, 1)
    readings = iter([OSError(errno.EMFILE, "too many open files")] * 2)  # at the start, and at the first call

    def read(*args: Any, **kwargs: Any) -> Any:
        for failure in readings:
            raise failure
        return read_form(*args, **kwargs)

    monkeypatch.setattr("weightsync.service.store.read_form", read)
    async with running_stack(tmp_path) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.visible()
        assert error_of(caught.value).reason == "DISK_ERROR"
        assert await stack.visible() == [Version(1, 1)]


async def test_two_services_never_share_a_directory(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as first:
        await push(first, 1)
        async with running_stack(tmp_path) as second:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await second.visible()
            assert error_of(caught.value).reason == "DIRECTORY_IN_USE"


async def test_a_version_is_a_directory_that_transformers_loads(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", 1)
    trained = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "trained", 2)).state_dict()
    async with running_stack(tmp_path / "out", model=str(model)) as stack:
        await stack.push(Version(1, 1), trained, deadline_s=TIMEOUT_S)
        names = sorted(trained)
        shards = [
            ShardSource("rank0", {name: trained[name] for name in names[::2]}),
            ShardSource("rank1", {name: trained[name] for name in names[1::2]}),
        ]
        for shard in shards:
            await stack.push_shard(shard, Version(1, 2), chunk_bytes=1 << 16)
        await stack.commit(manifest_of(Version(1, 2), *shards))
        for number in (1, 2):
            directory = stack.directory / f"v1.{number}"
            loaded = AutoModelForCausalLM.from_pretrained(directory)
            assert equal_bits(loaded.state_dict(), trained)
            assert len(AutoTokenizer.from_pretrained(directory)) == VOCABULARY
            assert loaded(torch.tensor([[5, 6]])).logits.shape == (1, 2, VOCABULARY)


async def test_a_version_has_the_chat_template_of_the_run(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", 1)
    (model / "chat_template.jinja").write_text("of the model")
    template = tmp_path / "mine.jinja"
    template.write_text("of the run: {{ messages }}", encoding="utf-8")
    async with running_stack(tmp_path / "out", model=str(model), chat_template=template) as stack:
        await stack.push(Version(1, 1), weights(1), deadline_s=TIMEOUT_S)
        assert AutoTokenizer.from_pretrained(stack.directory / "v1.1").chat_template == template.read_text()
    assert (model / "chat_template.jinja").read_text() == "of the model"


def reads_of(stack: Stack, run: str) -> list[Awaitable[object]]:
    """Every call that reads a run's versions, or says something of a replica that does."""
    version = Version(1, 1).to_proto()
    report = pb.ReportVersionRequest(run=run, replica="r", version=version, phase=pb.REPLICA_PHASE_SERVING)
    sync, delivery = stack.sync, stack.delivery
    return [
        sync.ListVersions(pb.ListVersionsRequest(run=run), timeout=TIMEOUT_S),
        sync.GetManifest(pb.GetManifestRequest(run=run), timeout=TIMEOUT_S),
        sync.DeleteVersion(pb.DeleteVersionRequest(run=run, version=version), timeout=TIMEOUT_S),
        delivery.WatchVersions(pb.WatchVersionsRequest(run=run), timeout=TIMEOUT_S).read(),
        delivery.ListSources(pb.ListSourcesRequest(run=run), timeout=TIMEOUT_S),
        delivery.PullWeights(pb.PullWeightsRequest(run=run, version=version, shard="model"), timeout=TIMEOUT_S).read(),
        delivery.GetUpdatePath(pb.GetUpdatePathRequest(run=run), timeout=TIMEOUT_S).read(),
        delivery.ReportVersion(report, timeout=TIMEOUT_S),
    ]


async def test_a_run_that_does_not_exist_is_not_found_and_nothing_is_made_for_it(tmp_path: Path) -> None:
    async with running_stack(tmp_path, max_runs=2) as stack:
        for number in range(3):
            for read in reads_of(stack, f"runs/typo-{number}"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await read
                assert error_of(caught.value).code is grpc.StatusCode.NOT_FOUND
                assert error_of(caught.value).reason == "NO_SUCH_RUN"
        assert not list(stack.directory.parent.parent.glob("typo*"))
        await WeightPublisher(stack.channel, "another").update(Version(1, 1), weights(1), deadline_s=TIMEOUT_S)
        with pytest.raises(SluiceError, match="TOO_MANY_RUNS"):
            await WeightPublisher(stack.channel, "a-third").update(Version(1, 1), weights(1), deadline_s=TIMEOUT_S)
