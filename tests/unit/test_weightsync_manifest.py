"""Exact cover, digests and names, on random cuts of random tensors."""

from __future__ import annotations

import random

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.manifest import (
    ManifestError,
    check_manifest,
    check_sendable,
    check_shard,
    from_json,
    manifest_digest,
    parse_run,
    parse_version_directory,
    run_resource,
    to_json,
    without_tensors,
)
from weightsync.format.safetensors import BadNameError, check_tensor


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """A shape, and boxes from cutting it again and again along random dimensions: never a plain grid."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, 6))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dimension]))
        for start, extent in ((0, cut), (cut, sizes[dimension] - cut)):
            if extent:
                moved, narrowed = list(offsets), list(sizes)
                moved[dimension] += start
                narrowed[dimension] = extent
                boxes.append((moved, narrowed))
    return shape, boxes


def manifest_of(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> pb.Manifest:
    manifest = pb.Manifest()
    for index, (offsets, sizes) in enumerate(boxes):
        shard = manifest.shards.add(name=f"rank{index}", size_bytes=1)
        shard.tensors.add(name="w", dtype="F32", global_shape=shape, offsets=offsets, sizes=sizes)
    return manifest


@given(cut_tensors(), st.randoms(use_true_random=False))
def test_any_cut_of_a_tensor_covers_it(
    cut: tuple[list[int], list[tuple[list[int], list[int]]]], order: random.Random
) -> None:
    shape, boxes = cut
    order.shuffle(boxes)
    check_manifest(manifest_of(shape, boxes))


@given(cut_tensors(), st.data())
def test_a_missing_or_doubled_slice_is_refused(
    cut: tuple[list[int], list[tuple[list[int], list[int]]]], data: st.DataObject
) -> None:
    shape, boxes = cut
    victim = data.draw(st.sampled_from(boxes))
    doubled = manifest_of(shape, [*boxes, victim])
    with pytest.raises(ManifestError, match="overlap"):
        check_manifest(doubled)
    if len(boxes) > 1:
        with pytest.raises(ManifestError, match="cover"):
            check_manifest(manifest_of(shape, [each for each in boxes if each is not victim]))


@given(cut_tensors(), st.data())
@settings(max_examples=50)
def test_a_shifted_slice_is_refused(
    cut: tuple[list[int], list[tuple[list[int], list[int]]]], data: st.DataObject
) -> None:
    shape, boxes = cut
    index = data.draw(st.integers(0, len(boxes) - 1))
    offsets, sizes = boxes[index]
    dimension = data.draw(st.integers(0, len(shape) - 1))
    boxes[index] = ([each + (position == dimension) for position, each in enumerate(offsets)], sizes)
    with pytest.raises(ManifestError):
        check_manifest(manifest_of(shape, boxes))


def test_slices_must_agree_on_the_tensor() -> None:
    manifest = manifest_of([4], [([0], [2]), ([2], [2])])
    manifest.shards[1].tensors[0].dtype = "BF16"
    with pytest.raises(ManifestError, match="disagree"):
        check_manifest(manifest)


@pytest.mark.parametrize("dtype", ["", "float32", "Q4"])
def test_unknown_data_types_are_refused(dtype: str) -> None:
    manifest = manifest_of([4], [([0], [4])])
    manifest.shards[0].tensors[0].dtype = dtype
    with pytest.raises(ManifestError, match="data type"):
        check_manifest(manifest)


def test_the_same_entry_twice_in_a_shard_is_refused() -> None:
    manifest = pb.Manifest()
    shard = manifest.shards.add(name="a")
    for name in ("v", "w"):
        shard.tensors.add(name=name, dtype="F32", global_shape=[1], entry="same")
    with pytest.raises(ManifestError, match="twice"):
        check_manifest(manifest)


def test_the_digest_of_a_version_is_fixed_by_its_specification() -> None:
    manifest = pb.Manifest(shards=[pb.Shard(name="one"), pb.Shard(name="two")])
    manifest.shards[0].tensors.add(name="b", dtype="BF16", global_shape=[2, 3], digest="01" * 16)
    manifest.shards[1].tensors.add(name="a", dtype="F32", digest="ff" * 16)
    manifest.shards[1].tensors.add(
        name="c", dtype="F32", global_shape=[4], offsets=[2], sizes=[2], entry="c@2", digest="02" * 16
    )
    lines = f"a F32 [] {'ff' * 16}\nb BF16 [2,3] {'01' * 16}\nc F32 [4] [2] [2] {'02' * 16}\n".encode()
    assert manifest_digest(manifest) == xxhash.xxh3_128(lines).hexdigest()


@given(order=st.permutations(["aa", "bb", "cc", "Z9"]), cut=st.integers(0, 4))
def test_the_digest_does_not_depend_on_order_and_shards(order: list[str], cut: int) -> None:
    def digest(*shards: list[str]) -> str:
        manifest = pb.Manifest()
        for names in shards:
            shard = manifest.shards.add(name=f"shard{len(manifest.shards)}")
            for name in names:
                shard.tensors.add(name=name, dtype="F32", global_shape=[1], digest=name * 16)
        return manifest_digest(manifest)

    assert digest(order[:cut], order[cut:]) == digest(sorted(order))


def test_a_manifest_survives_its_file_and_strangers_fields() -> None:
    manifest = manifest_of([4, 2], [([0, 0], [4, 2])])
    manifest.version.CopyFrom(Version(3, 1 << 40).to_proto())
    assert from_json(to_json(manifest)) == manifest
    assert from_json('{"run": "runs/a", "from_the_future": 1}').run == "runs/a"
    with pytest.raises(ManifestError):
        from_json("{")


def test_a_listing_leaves_out_what_the_shards_hold() -> None:
    manifest = manifest_of([4], [([0], [4])])
    short = without_tensors(manifest)
    assert [shard.name for shard in short.shards] == ["rank0"]
    assert not short.shards[0].tensors
    assert manifest.shards[0].tensors


@given(st.text(max_size=20))
def test_no_accepted_name_leaves_its_directory(name: str) -> None:
    for check in (check_shard, lambda text: parse_run(run_resource(text))):
        try:
            check(name)
        except BadNameError:
            continue
        assert "/" not in name
        assert not name.startswith(".")
        assert "\0" not in name


@pytest.mark.parametrize("name", ["two words", "tab\tname", "", "new\nline", "nul\0", "__metadata__"])
def test_tensor_names_cannot_disturb_the_digest(name: str) -> None:
    with pytest.raises(BadNameError):
        check_tensor(name)


@pytest.mark.parametrize("name", ["v1", "v01.2", "v1.2.3", ".incoming", "v1.-2", "model"])
def test_other_directories_are_no_versions(name: str) -> None:
    assert parse_version_directory(name) is None


def test_a_manifest_that_no_message_can_hold_is_refused_before_anything_is_sent() -> None:
    shard = pb.Shard(name="model", size_bytes=1)
    for number in range(60_000):
        shard.tensors.add(name=f"model.layers.{number}.experts.weight", dtype="BF16", global_shape=[64, 64])
    with pytest.raises(ManifestError, match="publish fused tensors"):
        check_sendable([shard])
    del shard.tensors[10_000:]
    check_sendable([shard])
