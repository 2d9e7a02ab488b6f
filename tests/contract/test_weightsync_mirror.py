"""A service and its mirror, here a directory: `file://`. tests/ecosystem/test_object_store.py has a real S3 server and its faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import torch
from relay_stack import Engine, Node, listing, running
from weightsync_stack import RESOURCE, RUN, equal_bits, error_of, eventually, weights

from sluice.config import ConfigError, SecurityConfig
from sluice.rpc import connect
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.config import WeightSyncConfig
from weightsync.inspect.weights_command import COMMAND
from weightsync.mirror.bucket import Bucket
from weightsync.mirror.layout import pin_name
from weightsync.publisher import WeightPublisher

FAST = {"heartbeat_s": 0.1, "mirror_poll_s": 0.05, "dense_delay_s": 0.0}


def changed(number: int) -> dict[str, torch.Tensor]:
    """The weights of a version; few of them differ from the version before."""
    tensors = weights(1)
    tensors["model.embed.weight"][:number] += 1
    return tensors


@asynccontextmanager
async def publishing(node: Node) -> AsyncIterator[WeightPublisher]:
    """A trainer, whose first version is dense."""
    async with connect(node.target, SecurityConfig()) as channel:
        yield WeightPublisher(channel, RUN)


async def publish(publisher: WeightPublisher, number: int, epoch: int = 1) -> None:
    update = await asyncio.to_thread(publisher.encode, Version(epoch, number), changed(number))
    await publisher.publish(update, deadline_s=60)


def stored(directory: Path) -> list[str]:
    """The manifests in a store, as `number.form`."""
    names = (path.name.split(".") for path in directory.glob(f"{RUN}/manifests/*.json"))
    return sorted(f"{int(number)}.{form}" for _, number, form, _ in names)


async def test_a_region_serves_the_versions_of_the_mirror(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    url = f"file://{tmp_path}/store"
    engine = Engine("far")
    async with (
        running(Node(tmp_path / "home", mirror=url, **FAST)) as home,
        running(Node(tmp_path / "far", upstream=url, **FAST)) as far,
        engine.receiving(far.target, tmp_path / "shm"),
        publishing(home) as publisher,
    ):
        for number in (1, 2, 3):
            await publish(publisher, number)
            await eventually(lambda: engine.version == Version(1, number))  # noqa: B023 - awaited in this round
            assert equal_bits(engine.tensors, changed(number))
        ours, theirs = await listing(home), await listing(far)
        assert [each.digest for each in ours.versions] == [each.digest for each in theirs.versions]
        sent, received = ours.mirrors[0], theirs.mirrors[0]
        assert (sent.use, received.use) == (pb.MIRROR_USE_WRITE, pb.MIRROR_USE_READ)
        assert sent.newest == received.newest == Version(1, 3).to_proto()
        assert (sent.delta_bytes, sent.versions_behind) == (received.delta_bytes, received.versions_behind)
        assert 0 < sent.delta_bytes < sent.dense_bytes
        for node, use in ((home, "written"), (far, "read")):
            capsys.readouterr()
            assert await asyncio.to_thread(COMMAND.run, ["ls", "--address", node.target, "--run", RUN]) == 0
            shown = next(line.split() for line in capsys.readouterr().out.splitlines() if url in line)
            assert shown[:4] == [url, use, "1.3", "0"]
        async with connect(far.target, SecurityConfig()) as channel:
            stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.DeleteVersion(
                    pb.DeleteVersionRequest(run=RESOURCE, version=Version(1, 1).to_proto()), timeout=60
                )
        assert f"call the service that writes {url}" in error_of(caught.value).message


async def test_a_mirror_is_pruned_but_for_what_is_pinned(tmp_path: Path) -> None:
    store = tmp_path / "store"
    bucket = Bucket.open(f"file://{store}", 30)
    await bucket.write(pin_name(RUN, Version(1, 2)), b"a paper cites it")
    settings = {**FAST, "mirror": bucket.url, "mirror_keep": 2, "anchor_every": 2}
    async with running(Node(tmp_path / "home", **settings)) as home, publishing(home) as publisher:
        for number in range(1, 9):
            await publish(publisher, number)
            await eventually(lambda: f"{number}.delta" in stored(store) or number == 1)  # noqa: B023
            await eventually((home.directory / f"v1.{number}").exists)  # so that there are anchors

        def is_pruned() -> bool:
            """Whether all is there that must be, and nothing of what may not; the mirror goes by one object after the other."""
            manifests = set(stored(store))
            folders = {path.parent.name.removesuffix(".json") for path in store.glob(f"{RUN}/parts/*/*")}
            return (
                {"1.dense", "2.delta", "7.delta", "8.delta"} <= manifests  # the pinned one with what leads to it
                and not {"3.delta", "4.delta"} & manifests
                and len(folders) == len(manifests)
            )

        await eventually(is_pruned)
        assert {path.name.partition(".")[0] for path in store.glob(f"{RUN}/parts/*")} <= {f"{1:020d}"}


async def test_a_trainer_that_resumed_from_a_checkpoint_is_followed_back(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    async with (
        running(Node(tmp_path / "home", mirror=url, **FAST)) as home,
        running(Node(tmp_path / "far", upstream=url, **FAST)) as far,
    ):
        async with publishing(home) as publisher:
            for number in (1, 2, 3):
                await publish(publisher, number)
        async with publishing(home) as restarted:
            await publish(restarted, 2, epoch=2)
            await eventually(lambda: far.newest() == Version(2, 2))
        await eventually(lambda: stored(tmp_path / "store") == ["1.dense", "2.delta", "2.dense"])


async def test_a_service_that_was_restarted_sends_and_takes_nothing_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    home = Node(tmp_path / "home", mirror=url, **FAST)
    far = Node(tmp_path / "far", upstream=url, **FAST)
    async with running(home), running(far):
        async with publishing(home) as publisher:
            await publish(publisher, 1)
            await eventually(lambda: far.newest() == Version(1, 1))
        for node in (home, far):
            await node.stop()
            await node.start()
        async with publishing(home) as publisher:
            await publish(publisher, 2)
            await eventually(lambda: far.newest() == Version(1, 2))
            size = next(each.size_bytes for each in (await listing(home)).versions)
            for node in (home, far):
                await eventually(lambda: moved_bytes(node) == size)  # noqa: B023 - awaited in this round


async def test_versions_of_another_run_of_the_same_name_are_not_mixed(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    async with running(Node(tmp_path / "old", mirror=url, **FAST)) as old, publishing(old) as publisher:
        for number in (1, 2):
            await publish(publisher, number)
        await eventually(lambda: stored(tmp_path / "store") == ["1.dense", "2.delta"])
    async with running(Node(tmp_path / "new", mirror=url, **FAST)) as new, publishing(new) as publisher:
        await publish(publisher, 1)
        await eventually(
            lambda: "another run named" in next(iter(new.serving.runs.describe_mirrors(only_run(new)))).error
        )
        mirror = (await listing(new)).mirrors[0]
        assert "the newest version there is 1.2, here 1.1" in mirror.error
        assert "set weightsync.mirror to another prefix" in mirror.error
        await publish(publisher, 2)  # commits do not mind
    assert stored(tmp_path / "store") == ["1.dense", "2.delta"]


def only_run(node: Node):
    return next(iter(node.serving.runs))


async def test_a_store_that_loses_a_part_gets_it_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    home = Node(tmp_path / "home", mirror=url, **FAST)
    async with running(home):
        async with publishing(home) as publisher:
            await publish(publisher, 1)
            await eventually(lambda: stored(tmp_path / "store") == ["1.dense"])
        (part,) = (tmp_path / "store").glob(f"{RUN}/parts/*/*")
        content = part.read_bytes()
        part.unlink()
        await home.stop()
        await home.start()  # looks at once, then every ten minutes
        await eventually(part.exists)
        assert part.read_bytes() == content


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@bucket/prefix",
        "s3://bucket/prefix?secret=hunter2",
        "https://hunter2.s3.amazonaws.com/bucket",
        "nfs://hunter2/bucket",
        "s3://",
    ],
)
@pytest.mark.parametrize("setting", ["mirror", "upstream"])
def test_a_url_that_cannot_be_used_is_refused_without_repeating_it(setting: str, url: str) -> None:
    with pytest.raises(ValueError, match="s3://BUCKET/PREFIX") as caught:
        WeightSyncConfig.model_validate({setting: url})
    message = caught.value.errors()[0]["msg"]  # what ConfigError shows
    assert "hunter2" not in message


def test_a_service_does_not_read_and_write_the_same_store() -> None:
    with pytest.raises(ValueError, match="either writes it or reads it"):
        WeightSyncConfig.model_validate({"mirror": "s3://b/p", "upstream": "s3://b/p"})


def test_a_store_that_the_environment_does_not_describe_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"no object store at az://container/prefix.*AZURE_"):
        Bucket.open("az://container/prefix", 30)


async def test_a_file_that_the_disk_damaged_is_not_mirrored(tmp_path: Path) -> None:
    home = Node(tmp_path / "home", **FAST)
    async with running(home):
        async with publishing(home) as publisher:
            await publish(publisher, 1)
        await home.stop()
        path = home.directory / "v1.1/model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        home.settings["mirror"] = f"file://{tmp_path}/store"
        await home.start()
        async with publishing(home) as publisher:  # it was restarted too, so its next version is dense
            await publish(publisher, 2)
            await eventually(lambda: stored(tmp_path / "store") == ["2.dense"])
            await eventually(lambda: describe(home).versions_behind == 0)


async def test_a_region_with_versions_of_another_run_says_so_and_keeps_them(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    far = Node(tmp_path / "far", **FAST)
    async with running(far), publishing(far) as publisher:
        update = await asyncio.to_thread(publisher.encode, Version(1, 1), weights(7))
        await publisher.publish(update, deadline_s=60)
        await far.stop()
        far.settings["upstream"] = url  # the operator's mistake: its directory holds another run of this name
        await far.start()
        async with running(Node(tmp_path / "home", mirror=url, **FAST)) as home, publishing(home) as trainer:
            for number in (1, 2):
                await publish(trainer, number)
            await eventually(lambda: "different runs of the same name" in describe(far).error)
            assert far.newest() == Version(1, 1)


def moved_bytes(node: Node) -> int:
    """What the node sent to the store, or took from there, since its start."""
    return describe(node).dense_bytes + describe(node).delta_bytes


def describe(node: Node) -> pb.MirrorState:
    return next(iter(node.serving.runs.describe_mirrors(only_run(node))))
