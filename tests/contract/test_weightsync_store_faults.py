"""What goes wrong behind a store's back, and what is left of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import grpc
import pytest
from delta_versions import push_delta
from relay_stack import LIMITS
from weightsync_stack import RESOURCE, RUN, error_of, eventually, running_stack, weights

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.manifest import version_directory
from weightsync.receive.pull import pull_shard
from weightsync.receive.sources import pull_call
from weightsync.relay import FetchError, fetch_version
from weightsync.service.store import RunStore

V1, V2 = Version(1, 1), Version(1, 2)


def test_two_forms_of_a_version_can_go_at_once(tmp_path: Path) -> None:
    store = RunStore(tmp_path, "")
    with ThreadPoolExecutor(2) as threads:
        for number in range(100):
            version = Version(1, number)
            forms = [parent / version_directory(version) for parent in (tmp_path, tmp_path / ".deltas")]
            for form in forms:
                form.mkdir(parents=True)
                for name in range(20):
                    (form / str(name)).touch()
            for going in [threads.submit(store.remove, version), threads.submit(store.remove_dense, version)]:
                going.result()
            assert not any(form.exists() for form in forms)


def test_two_versions_that_become_dense_at_once_both_get_the_model_s_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    names = {f"part-{number}.json" for number in range(20)}
    for name in names:
        (model / name).write_text("{}")
    with ThreadPoolExecutor(2) as threads:
        for trial in range(20):
            store = RunStore(tmp_path / str(trial), str(model))
            store.root.mkdir()
            together = Barrier(2)

            def publish(number: int, store: RunStore = store, together: Barrier = together) -> Path:
                manifest = pb.Manifest(version=Version(1, number).to_proto(), kind=pb.VERSION_KIND_ANCHOR)
                building = store.build_dense(Version(1, number))
                together.wait(10)
                return store.install_dense(manifest, building).directory

            for directory in threads.map(publish, (1, 2)):
                assert names < {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("name", [".incoming", ".building", ".deltas", ".trash", ".model"])
async def test_a_link_in_the_place_of_a_store_s_own_directory_is_removed_and_not_followed(
    tmp_path: Path, name: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    stranger = tmp_path / "stranger"
    for version in (V1, V2):
        (stranger / version_directory(version)).mkdir(parents=True)
        (stranger / version_directory(version) / "file").write_text("not the store's")
    kept = sorted(stranger.rglob("*"))
    root = tmp_path / "out" / RUN / "weights"
    root.mkdir(parents=True)
    (root / name).symlink_to(stranger)
    async with running_stack(tmp_path / "out", dense_delay_s=0, keep=1, model=str(model)) as stack:
        await stack.push(V1, weights(), deadline_s=30)
        await push_delta(stack, V2, V1, weights(1), weights())
        await eventually((stack.directory / "v1.2" / "manifest.json").exists)
        assert not list(stack.directory.glob(f"{name}/file"))
    assert sorted(stranger.rglob("*")) == kept
    assert not (root / name).is_symlink()


async def test_a_run_that_could_not_be_opened_can_be_opened_later(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        await stack.push(V1, weights(), deadline_s=30)
        await stack.push(V2, weights(1), deadline_s=30)
    (stack.directory / version_directory(V1) / "manifest.json").write_text("damaged")
    in_the_way = stack.directory / ".trash"
    in_the_way.touch()
    async with running_stack(tmp_path) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stack.visible()
        assert error_of(failed.value).reason == "DISK_ERROR"
        in_the_way.unlink()
        assert await stack.visible() == [V2]


async def test_a_version_whose_base_is_found_damaged_under_its_commit_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_stack(tmp_path, dense_delay_s=3600) as stack:
        await stack.push(V1, weights(), deadline_s=30)
        await push_delta(stack, V2, V1, weights(1), weights())
        run = await stack.runs.open(RESOURCE)
        commit = run.store.commit

        def commit_late(*args: object) -> object:
            run.ledger.mark_damaged(V2)
            return commit(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(run.store, "commit", commit_late)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await push_delta(stack, Version(1, 3), V2, weights(2), weights(1))
        assert error_of(refused.value).reason == "BASE_DAMAGED"
        assert not list(stack.directory.rglob("v1.3*"))


async def test_a_dense_form_whose_source_cannot_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_stack(tmp_path, dense_delay_s=0, heartbeat_s=0.1) as stack:
        await stack.push(V1, weights(), deadline_s=30)
        file = stack.directory / "v1.1" / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:8] + b"?" + whole[9:])
        run = await stack.runs.open(RESOURCE)
        ended, drop = [], run.store.drop_building
        monkeypatch.setattr(run.store, "drop_building", lambda version: (drop(version), ended.append(version)))
        await push_delta(stack, V2, V1, weights(1), weights())
        await eventually(lambda: ended)
        assert not (stack.directory / "v1.2").exists()
        file.write_bytes(whole)
        await eventually((stack.directory / "v1.2").exists)


async def test_names_from_upstream_do_not_leave_the_directory(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        run = await stack.runs.open(RESOURCE)
        manifest = pb.Manifest(run=RESOURCE, version=V1.to_proto(), kind=pb.VERSION_KIND_ANCHOR)
        manifest.shards.add(name="../../outside", size_bytes=10)
        pull = partial(pull_shard, pull_call(stack.channel), threads=stack.runs.threads, limits=LIMITS)
        with pytest.raises((FetchError, SluiceError), match="shard name"):
            await fetch_version(stack.runs, run, manifest, pull)
        assert not run.uploads
