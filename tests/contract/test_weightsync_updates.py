"""Encode and publish: anchors and deltas from one kept copy, and what happens when something is lost on the way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from held_ports import held_ports
from safetensors.torch import load_file
from structlog.testing import capture_logs
from weightsync_stack import RESOURCE, Stack, equal_bits, eventually, running_stack, weights

from sluice.cli.init_model import ModelShape, init_model
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine.engine import TrainEngine
from weightsync.publish.push import _ShardTransfer
from weightsync.publish.shards import HOST_DIRECTORY, KeptFile
from weightsync.publisher import PushReport, WeightPublisher
from weightsync.service.upload import Upload

pytestmark = pytest.mark.slow

RUN = RESOURCE.removeprefix("runs/")
DEADLINE_S = 60
FEW_CHUNKS = 10
LOST_S = 1
"""Deadline of a push to a service that is gone."""


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path, dense_delay_s=0) as running:
        yield running


@pytest.fixture
def publisher(stack: Stack) -> WeightPublisher:
    return WeightPublisher(stack.channel, RUN, chunk_bytes=1000)


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a service that is started again."""
    with held_ports(1) as (port,):
        yield port


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in weights(seed).items()} | {
        "model.layer.weight": torch.randn(300, 40, generator=torch.Generator().manual_seed(seed)).bfloat16()
    }


def nudge(tensors: dict[str, torch.Tensor], seed: int) -> None:
    """A few values of one tensor, as a small learning rate does."""
    tensor = tensors["model.layer.weight"]
    random = torch.Generator().manual_seed(seed)
    mask = torch.rand(tensor.shape, generator=random) < 0.02
    tensor.copy_(torch.where(mask, tensor * 1.01, tensor))


async def dense(stack: Stack, version: Version) -> dict[str, torch.Tensor]:
    """The Hugging Face directory of a version, which the service makes in the background."""
    path = stack.directory / f"v{version}"
    await eventually((path / "manifest.json").exists)
    return load_file(path / "model.safetensors")


async def manifest(stack: Stack, version: Version) -> pb.Manifest:
    request = pb.GetManifestRequest(run=RESOURCE, version=version.to_proto())
    return (await stack.sync.GetManifest(request, timeout=DEADLINE_S)).manifest


async def test_an_engine_publishes_its_weights_without_a_service_around_it(
    stack: Stack, publisher: WeightPublisher, tmp_path: Path
) -> None:
    init_model(tmp_path / "tiny", ModelShape(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=16))
    engine = TrainEngine(ComputeConfig(device="cpu"), tmp_path / "tiny")
    kinds = []
    for version in (Version(1, 1), Version(1, 2)):
        kinds.append(
            (await publisher.update(version, engine.live_tensors(), dtype=torch.bfloat16, deadline_s=DEADLINE_S)).kind
        )
        assert equal_bits(await dense(stack, version), engine.named_tensors(torch.bfloat16))
        engine.live_tensors()["model.norm.weight"].mul_(1.01)
    assert kinds == ["anchor", "delta"]


async def test_the_first_version_is_an_anchor_and_the_next_ones_are_deltas(
    stack: Stack, publisher: WeightPublisher
) -> None:
    tensors = model()
    kinds = []
    for number in range(1, 5):
        version = Version(1, number)
        report = await publisher.update(version, tensors, deadline_s=DEADLINE_S)
        kinds.append(report.kind)
        assert equal_bits(await dense(stack, version), tensors)
        nudge(tensors, number)
    assert kinds == ["anchor", "delta", "delta", "delta"]


async def test_a_delta_reports_what_it_cost(stack: Stack, publisher: WeightPublisher) -> None:
    tensors = model()
    first = await publisher.update(Version(1, 1), tensors, deadline_s=DEADLINE_S)
    nudge(tensors, 1)
    report = await publisher.update(Version(1, 2), tensors, deadline_s=DEADLINE_S, labels={"optimizer_steps": "2"})
    elements = sum(tensor.numel() for tensor in tensors.values())
    assert first.changed_fraction == 1
    assert report.dense_bytes == first.dense_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert 0 < report.bytes_sent < report.dense_bytes / 10
    assert 0 < report.changed_fraction < 300 * 40 * 0.03 / elements
    assert report.diff_s > 0
    stored = await manifest(stack, Version(1, 2))
    assert Version.from_proto(stored.base) == Version(1, 1)
    assert stored.push_timings.changed_fraction == pytest.approx(report.changed_fraction)
    assert stored.push_timings.diff.ToNanoseconds() == pytest.approx(report.diff_s * 1e9, rel=1e-3)
    assert stored.push_timings.push.ToNanoseconds() > 0
    assert stored.labels["optimizer_steps"] == "2"


async def test_weights_that_all_changed_go_out_whole_and_trials_become_rare(
    stack: Stack, publisher: WeightPublisher
) -> None:
    reports = []
    for number in range(1, 5):
        tensors = model(number)
        reports.append(await publisher.update(Version(1, number), tensors, deadline_s=DEADLINE_S))
        assert equal_bits(await dense(stack, Version(1, number)), tensors)
    assert {report.kind for report in reports} == {"anchor"}
    assert [report.changed_fraction < 1 for report in reports] == [False, True, False, True]


async def test_dense_encoding_never_compares(stack: Stack) -> None:
    publisher = WeightPublisher(stack.channel, RUN, encoding="dense")
    tensors = model()
    for number in (1, 2):
        report = await publisher.update(Version(1, number), tensors, deadline_s=DEADLINE_S)
        assert (report.kind, report.changed_fraction) == ("anchor", 1)


async def test_weights_may_change_once_they_are_encoded(stack: Stack, publisher: WeightPublisher) -> None:
    tensors = model()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    update = await asyncio.to_thread(publisher.encode, Version(1, 1), tensors)
    for tensor in tensors.values():
        tensor.zero_()
    await publisher.publish(update, deadline_s=DEADLINE_S)
    assert equal_bits(await dense(stack, Version(1, 1)), before)


async def test_encoding_waits_for_the_push_that_reads_the_copy(stack: Stack, publisher: WeightPublisher) -> None:
    first, second = model(1), model(2)
    update = await asyncio.to_thread(publisher.encode, Version(1, 1), first)
    pushing = asyncio.create_task(publisher.publish(update, deadline_s=DEADLINE_S))
    await asyncio.sleep(0)  # the push has the copy now
    with pytest.raises(SluiceError) as hurried:
        publisher.encode(Version(1, 2), second, deadline_s=0)
    assert hurried.value.reason == "PUSH_IN_PROGRESS"
    later = await asyncio.to_thread(publisher.encode, Version(1, 2), second)
    assert pushing.done()
    await pushing
    await publisher.publish(later, deadline_s=DEADLINE_S)
    assert equal_bits(await dense(stack, Version(1, 1)), first)
    assert equal_bits(await dense(stack, Version(1, 2)), second)


async def test_an_update_that_was_overtaken_is_refused(stack: Stack, publisher: WeightPublisher) -> None:
    old = await asyncio.to_thread(publisher.encode, Version(1, 1), model(1))
    new = await asyncio.to_thread(publisher.encode, Version(1, 2), model(2))
    with pytest.raises(SluiceError) as refused:
        await publisher.publish(old, deadline_s=DEADLINE_S)
    assert refused.value.reason == "OVERTAKEN"
    assert (await publisher.publish(new, deadline_s=DEADLINE_S)).kind == "anchor"
    assert await stack.visible() == [Version(1, 2)]


async def test_publishing_again_finds_the_version(stack: Stack, publisher: WeightPublisher) -> None:
    tensors = model()
    await publisher.update(Version(1, 1), tensors, deadline_s=DEADLINE_S)
    nudge(tensors, 1)
    update = await asyncio.to_thread(publisher.encode, Version(1, 2), tensors)
    first = await publisher.publish(update, deadline_s=DEADLINE_S)
    again = await publisher.publish(update, deadline_s=DEADLINE_S)
    assert (first.kind, again.duplicate, again.bytes_sent, again.digest) == ("delta", True, 0, first.digest)


async def test_a_new_epoch_begins_with_an_anchor(stack: Stack, publisher: WeightPublisher) -> None:
    tensors = model()
    await publisher.update(Version(1, 7), tensors, deadline_s=DEADLINE_S)
    report = await publisher.update(Version(2, 5), tensors, deadline_s=DEADLINE_S)
    assert report.kind == "anchor"


async def test_a_model_that_became_another_one_begins_with_an_anchor(stack: Stack, publisher: WeightPublisher) -> None:
    await publisher.update(Version(1, 1), {"w": torch.ones(64, 64)}, deadline_s=DEADLINE_S)
    for number, shape in enumerate(
        [(4096,), (32, 128)], start=2
    ):  # zeros: the difference from an empty copy is nothing
        report = await publisher.update(Version(1, number), {"w": torch.zeros(shape)}, deadline_s=DEADLINE_S)
        assert report.kind == "anchor"
        assert torch.equal((await dense(stack, Version(1, number)))["w"], torch.zeros(shape))


async def test_a_service_that_lost_the_base_gets_the_whole_version_at_once(tmp_path: Path, port: int) -> None:
    tensors = model()
    async with running_stack(tmp_path / "one", port=port) as stack:
        channel = connect(stack.target, SecurityConfig())
        publisher = WeightPublisher(channel, RUN)
        await publisher.update(Version(1, 1), tensors, deadline_s=DEADLINE_S)
    nudge(tensors, 1)
    async with running_stack(tmp_path / "another", port=port) as stack:
        report = await publisher.update(Version(1, 2), tensors, deadline_s=DEADLINE_S)
        assert report.kind == "anchor"
        assert equal_bits(await dense(stack, Version(1, 2)), tensors)
        nudge(tensors, 2)
        assert (await publisher.update(Version(1, 3), tensors, deadline_s=DEADLINE_S)).kind == "delta"
        assert equal_bits(await dense(stack, Version(1, 3)), tensors)
        await channel.close()


async def test_a_lost_push_is_followed_by_an_anchor(tmp_path: Path, port: int) -> None:
    tensors = model()
    async with running_stack(tmp_path, port=port) as stack:
        channel = connect(stack.target, SecurityConfig())
        publisher = WeightPublisher(channel, RUN)
        await publisher.update(Version(1, 1), tensors, deadline_s=DEADLINE_S)
        nudge(tensors, 1)
        update = await asyncio.to_thread(publisher.encode, Version(1, 2), tensors)
    with pytest.raises(SluiceError) as lost:  # the service is gone between encode and commit
        await publisher.publish(update, deadline_s=LOST_S)
    assert lost.value.code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    nudge(tensors, 2)
    async with running_stack(tmp_path, port=port) as stack:
        assert await stack.visible() == [Version(1, 1)]
        report = await publisher.update(Version(1, 3), tensors, deadline_s=DEADLINE_S)
        assert report.kind == "anchor"
        assert equal_bits(await dense(stack, Version(1, 3)), tensors)
        assert await stack.visible() == [Version(1, 3), Version(1, 1)]
        await channel.close()


@pytest.mark.parametrize("kind", ["anchor", "delta"])
async def test_a_push_whose_service_restarts_in_the_middle_of_it_is_repeated(
    kind: str, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, restarted = model(), asyncio.Event()
    requests = _ShardTransfer._requests

    async def half_of_them(transfer: _ShardTransfer, offset: int) -> AsyncIterator[bytes]:
        count = 0
        async for each in requests(transfer, offset):
            count += 1
            if count > FEW_CHUNKS:
                await restarted.wait()
            yield each

    async with running_stack(tmp_path, port=port) as stack:
        channel = connect(stack.target, SecurityConfig())
        publisher = WeightPublisher(channel, RUN)
        if kind == "delta":
            await publisher.update(Version(1, 1), tensors, deadline_s=DEADLINE_S)
            nudge(tensors, 1)
        publisher._chunk_bytes = 8
        monkeypatch.setattr(_ShardTransfer, "_requests", half_of_them)
        update = await asyncio.to_thread(publisher.encode, Version(1, 2), tensors)
        pushing = asyncio.create_task(publisher.publish(update, deadline_s=DEADLINE_S))
        incoming = stack.directory / ".incoming"
        await eventually(lambda: any(path.is_file() and path.stat().st_size for path in incoming.rglob("*")))
    assert not pushing.done()
    restarted.set()
    async with running_stack(tmp_path, port=port, dense_delay_s=0) as stack:
        report = await pushing
        assert report.kind == kind
        assert equal_bits(await dense(stack, Version(1, 2)), tensors)
        await channel.close()


async def push_without_room(stack: Stack, publisher: WeightPublisher) -> asyncio.Task[PushReport]:
    """Begin a push that the service refuses until it has more room, and return when it was refused."""
    held = await stack.push(Version(1, 1), model(), deadline_s=DEADLINE_S)
    stack.runs.config.max_bytes = int(1.5 * held.bytes_sent)
    with capture_logs() as lines:
        pushing = asyncio.create_task(publisher.update(Version(1, 2), model(2), deadline_s=DEADLINE_S))
        await eventually(lambda: any(line["event"] == "push failed, retrying" for line in lines))
    return pushing


async def test_a_push_without_room_is_repeated_until_there_is_room(stack: Stack, publisher: WeightPublisher) -> None:
    pushing = await push_without_room(stack, publisher)
    stack.runs.config.max_bytes = None
    assert (await pushing).kind == "anchor"
    assert await stack.visible() == [Version(1, 2), Version(1, 1)]


async def test_a_push_that_is_given_up_ends_at_its_next_attempt(stack: Stack, publisher: WeightPublisher) -> None:
    pushing = await push_without_room(stack, publisher)
    publisher.give_up()
    with pytest.raises(SluiceError) as ended:
        await pushing
    assert ended.value.reason == "OVERTAKEN"


async def test_a_tensor_that_cannot_travel_leaves_the_publisher_of_use(
    stack: Stack, publisher: WeightPublisher
) -> None:
    tensors = model()
    await publisher.update(Version(1, 1), tensors, deadline_s=DEADLINE_S)
    with pytest.raises(ValueError, match="complex"):
        await publisher.update(
            Version(1, 2), tensors | {"odd": torch.zeros(2, dtype=torch.complex64)}, deadline_s=DEADLINE_S
        )
    assert (await publisher.update(Version(1, 2), tensors, deadline_s=DEADLINE_S)).kind == "anchor"


async def test_a_process_alone_that_holds_a_part_of_a_tensor_is_told_before_anything_is_sent(
    stack: Stack, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DTensor of several ranks, published without their group."""
    half = pb.TensorSlice(name="w", dtype="F32", global_shape=[4], offsets=[0], sizes=[2], entry="w@0")
    monkeypatch.setattr("weightsync.publisher.local_slices", lambda *_: [(half, torch.zeros(2))])
    with pytest.raises(ValueError, match="cover 2 of its 4 elements"):
        await publisher.update(Version(1, 1), {"w": torch.zeros(2)}, deadline_s=DEADLINE_S)
    assert await stack.visible() == []


async def test_a_push_that_is_repeated_counts_once_as_a_comparison_in_vain(
    stack: Stack, publisher: WeightPublisher
) -> None:
    await publisher.update(Version(1, 1), model(), deadline_s=DEADLINE_S)
    tensors, compared = model(1), []
    for number in range(2, 6):
        update = await asyncio.to_thread(publisher.encode, Version(1, number), tensors)
        compared.append(update.base is not None)
        for _ in range(3 if number == 2 else 1):
            await publisher.publish(update, deadline_s=DEADLINE_S)
    assert compared == [True, False, True, True], "one version is left out after one comparison in vain"


needs_shared_memory = pytest.mark.skipif(KeptFile(1, HOST_DIRECTORY).path is None, reason="no shared memory for files")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Files that the service took from its host's memory: one entry each."""
    found: list[int] = []
    copy = Upload.copy

    def count(upload: Upload, ticket: object, source: int, end: int) -> None:
        copy(upload, ticket, source, end)
        if end == upload.size:
            found.append(end)

    monkeypatch.setattr(Upload, "copy", count)
    return found


@needs_shared_memory
async def test_files_are_offered_again_after_the_service_could_not_take_one(tmp_path: Path, copies: list[int]) -> None:
    async with running_stack(tmp_path, local_dir=None) as stack:
        publisher = WeightPublisher(stack.channel, RUN, local=True)
        taken = []
        for number in range(1, 5):
            await publisher.update(Version(1, number), model(number), deadline_s=DEADLINE_S)
            taken.append(len(copies))
            stack.runs.config.local_dir = HOST_DIRECTORY  # the cause has passed
        assert taken == [0, 0, 1, 2], "one version is left out after the first refusal"
        await publisher.close()


@needs_shared_memory
async def test_a_delta_is_handed_over_where_there_is_room_for_it_alone(
    tmp_path: Path, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_stack(tmp_path, dense_delay_s=60) as stack:
        publisher, tensors = WeightPublisher(stack.channel, RUN, local=True), model()
        await publisher.update(Version(1, 1), tensors, deadline_s=DEADLINE_S)
        nudge(tensors, 1)
        size = (await publisher.update(Version(1, 2), tensors, deadline_s=DEADLINE_S)).bytes_sent
        nudge(tensors, 1)
        room = os.statvfs_result((1, 1, 2 * size, 2 * size, 2 * size, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: room)
        await publisher.update(Version(1, 3), tensors, deadline_s=DEADLINE_S)
        assert len(copies) == 3
        await publisher.close()


@needs_shared_memory
@pytest.mark.parametrize("service_reads", [True, False])
async def test_on_one_host_files_are_handed_over_and_chunks_go_where_they_are_not_taken(
    service_reads: bool, tmp_path: Path, copies: list[int]
) -> None:
    before = set(HOST_DIRECTORY.glob("sluice-push-*"))
    local_dir = HOST_DIRECTORY if service_reads else None
    async with running_stack(tmp_path, dense_delay_s=0, local_dir=local_dir) as stack:
        publisher = WeightPublisher(stack.channel, RUN, local=True)
        tensors, reports = model(), []
        for number in range(1, 4):
            version = Version(1, number)
            reports.append(await publisher.update(version, tensors, deadline_s=DEADLINE_S))
            assert equal_bits(await dense(stack, version), tensors)
            assert len(set(HOST_DIRECTORY.glob("sluice-push-*")) - before) == 1, "the kept copy, and no delta"
            nudge(tensors, number)
        assert [report.kind for report in reports] == ["anchor", "delta", "delta"]
        assert all(report.bytes_sent > 0 for report in reports)
        assert len(copies) == (3 if service_reads else 0)
        await publisher.close()
        assert set(HOST_DIRECTORY.glob("sluice-push-*")) <= before


async def test_a_push_that_fails_leaves_no_file_behind(tmp_path: Path) -> None:
    before = set(HOST_DIRECTORY.glob("sluice-push-*"))
    async with running_stack(tmp_path) as stack:
        channel = connect(stack.target, SecurityConfig())
        publisher = WeightPublisher(channel, RUN, local=True)
        tensors = model()
        await publisher.update(Version(1, 1), tensors, deadline_s=DEADLINE_S)
        nudge(tensors, 1)
    with pytest.raises(SluiceError):
        await publisher.update(Version(1, 2), tensors, deadline_s=LOST_S)
    assert len(set(HOST_DIRECTORY.glob("sluice-push-*")) - before) <= 1
    await channel.close()
    await publisher.close()
    assert set(HOST_DIRECTORY.glob("sluice-push-*")) <= before
