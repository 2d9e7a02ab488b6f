"""Staging: one verified file out of many shards, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weightsync_stack import equal_bits, manifest_of, weights

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.chunks import make_chunk
from weightsync.shard_source import ShardSource
from weightsync.stage_area import StageArea, remove_stale
from weightsync.staged import StagedVersion, TensorSpec
from weightsync.staging import StagingError, StagingFile

V1 = Version(1, 1)


def stage(
    path: Path, manifest: pb.Manifest, *sources: ShardSource, damage: Callable[[pb.Chunk], None] | None = None
) -> StagedVersion:
    staging = StagingFile(manifest, path)
    try:
        for source in sources:
            for begin, end in source.spans(0, 97):
                chunk = make_chunk(begin, source.read(begin, end))
                if damage is not None:
                    damage(chunk)
                staging.feed(source.name, chunk)
        return staging.finish()
    finally:
        staging.discard()


def split(tensors: dict[str, torch.Tensor], count: int) -> list[ShardSource]:
    names = sorted(tensors)
    return [
        ShardSource(f"rank{index}", {name: tensors[name] for name in names[index::count]}) for index in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_any_number_of_shards_becomes_one_file(tmp_path: Path, count: int) -> None:
    sources = split(weights(), count)
    staged = stage(tmp_path / "v.safetensors", manifest_of(V1, *sources), *sources)
    assert equal_bits(load_file(staged.path), weights())
    assert staged.version == V1
    assert staged.tensors["model.embed.weight"] == TensorSpec("F32", (64, 16))
    assert staged.tensors.keys() == weights().keys()


def change_digest(manifest: pb.Manifest) -> None:
    manifest.shards[0].tensors[0].digest = "0" * 32


def change_version_digest(manifest: pb.Manifest) -> None:
    manifest.digest = "0" * 32


def change_name(manifest: pb.Manifest) -> None:
    manifest.shards[0].tensors[0].name = "other"


def change_kind(manifest: pb.Manifest) -> None:
    manifest.kind = pb.VERSION_KIND_DELTA


def rename_entry(manifest: pb.Manifest) -> None:
    manifest.shards[0].tensors[0].entry = "other"


def add_shard(manifest: pb.Manifest) -> None:
    manifest.shards.add(name="more", size_bytes=8).tensors.add(name="x", dtype="F32", global_shape=[1])


@pytest.mark.parametrize(
    "change", [change_digest, change_version_digest, change_name, change_kind, rename_entry, add_shard]
)
def test_what_differs_from_its_manifest_is_never_staged(tmp_path: Path, change: Callable[[pb.Manifest], None]) -> None:
    source = ShardSource("model", weights())
    manifest = manifest_of(V1, source)
    change(manifest)
    with pytest.raises(StagingError):
        stage(tmp_path / "v.safetensors", manifest, source)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_chunk_is_never_staged(tmp_path: Path) -> None:
    def flip(chunk: pb.Chunk) -> None:
        if chunk.offset >= 970:
            chunk.data = bytes([chunk.data[0] ^ 4]) + chunk.data[1:]

    source = ShardSource("model", weights())
    with pytest.raises(StagingError, match="crc32c"):
        stage(tmp_path / "v.safetensors", manifest_of(V1, source), source, damage=flip)
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_finite_are_never_staged(tmp_path: Path) -> None:
    source = ShardSource("model", {"w": torch.tensor([1.0, float("nan")])})
    with pytest.raises(StagingError, match="NaN"):
        stage(tmp_path / "v.safetensors", manifest_of(V1, source), source)


def test_chunks_out_of_order_are_refused(tmp_path: Path) -> None:
    source = ShardSource("model", weights())
    staging = StagingFile(manifest_of(V1, source), tmp_path / "v.safetensors")
    with pytest.raises(StagingError, match="instead"):
        staging.feed("model", make_chunk(8, source.read(8, 16)))
    staging.discard()


def test_a_stage_area_lives_as_long_as_its_replica(tmp_path: Path) -> None:
    first, second = StageArea(tmp_path, "run", "replica"), StageArea(tmp_path, "run", "replica")
    assert first.path != second.path
    assert remove_stale(tmp_path) == []
    second.close()
    second.close()
    assert first.path.exists()
    assert not second.path.exists()
    first.close()


def test_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sluice-something-else").mkdir()
    (tmp_path / "other").mkdir()
    assert remove_stale(tmp_path) == []


def test_a_replicas_name_cannot_leave_the_stage_directory(tmp_path: Path) -> None:
    area = StageArea(tmp_path / "shm", "run", "../../evil/replica")
    assert area.path.parent == tmp_path / "shm"
    area.close()
