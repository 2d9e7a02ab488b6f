"""Staging: one verified file out of many shards, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weightsync_stack import ShardSource, equal_bits, make_chunk, manifest_of, read_source, weights

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.chunks import ChunkError, read_pull_response
from weightsync.format.safetensors import FileLayout, read_layout
from weightsync.receive.version_file import DenseFile, StagingError

V1 = Version(1, 1)


def stage(path: Path, manifest: pb.Manifest, *sources: ShardSource) -> FileLayout:
    with path.open("w+b") as file:
        staging = DenseFile(manifest, file.fileno())
        for source in sources:
            for begin, end in source.spans(0, 97):
                staging.sinks[source.name].feed(begin, memoryview(read_source(source, begin, end)))
        return staging.finish()


def split(tensors: dict[str, torch.Tensor], count: int) -> list[ShardSource]:
    names = sorted(tensors)
    return [
        ShardSource(f"rank{index}", {name: tensors[name] for name in names[index::count]}) for index in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_any_number_of_shards_becomes_one_file(tmp_path: Path, count: int) -> None:
    sources = split(weights(), count)
    path = tmp_path / "v.safetensors"
    layout = stage(path, manifest_of(V1, *sources), *sources)
    assert equal_bits(load_file(path), weights())
    with path.open("rb") as file:
        assert read_layout(file.fileno()) == layout
    assert (layout.entries["model.embed.weight"].dtype, layout.entries["model.embed.weight"].shape) == ("F32", (64, 16))


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


def test_of_a_damaged_chunk_nothing_is_kept(tmp_path: Path) -> None:
    source = ShardSource("model", weights())
    with (tmp_path / "v.safetensors").open("w+b") as file:
        staging = DenseFile(manifest_of(V1, source), file.fileno())
        sink = staging.sinks["model"]
        for begin, end in source.spans(0, 97):
            chunk = make_chunk(begin, read_source(source, begin, end))
            flipped = pb.Chunk(offset=begin, data=bytes([chunk.data[0] ^ 4]) + chunk.data[1:], crc32c=chunk.crc32c)
            with pytest.raises(ChunkError, match="crc32c"):
                sink.feed(*read_pull_response(pb.PullWeightsResponse(chunk=flipped).SerializeToString()))
            assert sink.position == begin
            sink.feed(*read_pull_response(pb.PullWeightsResponse(chunk=chunk).SerializeToString()))
        staging.finish()
    assert equal_bits(load_file(tmp_path / "v.safetensors"), weights())


def test_bytes_changed_under_a_right_checksum_show_in_a_digest(tmp_path: Path) -> None:
    source = ShardSource("model", weights())
    path = tmp_path / "v.safetensors"
    with path.open("w+b") as file:
        staging = DenseFile(manifest_of(V1, source), file.fileno())
        for begin, end in source.spans(0, 97):
            data = read_source(source, begin, end)
            changed = bytes([data[0] ^ 4]) + data[1:] if begin >= 4850 else data
            staging.sinks["model"].feed(begin, memoryview(changed))
        with pytest.raises(StagingError, match="digest"):
            staging.finish()


def test_values_that_are_not_finite_are_never_staged(tmp_path: Path) -> None:
    source = ShardSource("model", {"w": torch.tensor([1.0, float("nan")])})
    with pytest.raises(StagingError, match="NaN"):
        stage(tmp_path / "v.safetensors", manifest_of(V1, source), source)


def test_chunks_out_of_order_are_refused(tmp_path: Path) -> None:
    source = ShardSource("model", weights())
    with (tmp_path / "v.safetensors").open("w+b") as file:
        sink = DenseFile(manifest_of(V1, source), file.fileno()).sinks["model"]
        with pytest.raises(StagingError, match="instead"):
            sink.feed(8, memoryview(read_source(source, 8, 16)))


def test_shards_may_come_side_by_side(tmp_path: Path) -> None:
    sources = split(weights(), 3)
    path = tmp_path / "v.safetensors"
    with path.open("w+b") as file:
        staging = DenseFile(manifest_of(V1, *sources), file.fileno())
        spans = [iter(list(source.spans(0, 97))) for source in sources]
        waiting = list(zip(sources, spans, strict=True))
        while waiting:
            for source, rest in list(waiting):
                span = next(rest, None)
                if span is None:
                    waiting.remove((source, rest))
                else:
                    staging.sinks[source.name].feed(span[0], memoryview(read_source(source, *span)))
        staging.finish()
    assert equal_bits(load_file(path), weights())
