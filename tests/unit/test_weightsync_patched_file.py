"""Patching: whatever the slices, encodings and chains, the file ends up as the dense version, bit for bit, or is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weightsync_stack import RESOURCE

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.codec.slices import Encoding, encode
from weightsync.format.manifest import manifest_digest
from weightsync.format.safetensors import DTYPES, Entry, place, render_header
from weightsync.receive.version_file import DeltaShard, PatchedFile, StagingError

Tensor = npt.NDArray[np.uint8]
Model = dict[str, tuple[str, tuple[int, ...], Tensor]]
"""Data type, shape, and the bytes as an array of that shape with the bytes of an element as last dimension."""

Cut = list[tuple[tuple[int, ...], tuple[int, ...]]]


def finite(random: np.random.Generator, dtype: str, count: int) -> Tensor:
    """Bytes of finite values."""
    kinds = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "I64": np.int64, "U8": np.uint8}
    values = random.standard_normal(count)
    if dtype == "BF16":
        whole = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        whole = (values * (1 if dtype.startswith("F") else 100)).astype(kinds[dtype])
    return whole.view(np.uint8).reshape(count, DTYPES[dtype].size).copy()


def new_model(random: np.random.Generator, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Model:
    return {
        f"t{index}": (dtype, shape, finite(random, dtype, math.prod(shape)).reshape(*shape, DTYPES[dtype].size))
        for index, (dtype, shape) in enumerate(shapes)
    }


def step(random: np.random.Generator, model: Model) -> Model:
    """The next version: some elements of some tensors are others."""
    changed: Model = {}
    for name, (dtype, shape, before) in model.items():
        data = before.copy()
        flat = data.reshape(-1, data.shape[-1])
        chosen = random.random(len(flat)) < random.choice([0.0, 0.05, 1.0])
        flat[chosen] = finite(random, dtype, int(chosen.sum()))
        changed[name] = (dtype, shape, data)
    return changed


def cut(random: np.random.Generator, shape: tuple[int, ...]) -> Cut:
    """A grid over the tensor: whole, by rows, by columns or both."""
    edges = []
    for extent in shape:
        inner = sorted(set(random.integers(1, extent, size=random.integers(0, 3)).tolist())) if extent > 1 else []
        edges.append(list(itertools.pairwise([0, *inner, extent])))
    return [
        (tuple(begin for begin, _ in cell), tuple(end - begin for begin, end in cell))
        for cell in itertools.product(*edges)
    ]


def region(data: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    where = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    return np.ascontiguousarray(data[where]).reshape(-1)


def delta(random: np.random.Generator, number: int, base: Model, model: Model) -> tuple[pb.Manifest, dict[str, bytes]]:
    """Return a delta in two shards. Its tensors are cut differently from the base's, and its slices spread over the shards at random."""
    version, before = Version(1, number), Version(1, number - 1)
    manifest = pb.Manifest(run=RESOURCE, version=version.to_proto(), kind=pb.VERSION_KIND_DELTA, base=before.to_proto())
    contents: list[list[tuple[str, str, tuple[int, ...], bytes]]] = [[], []]
    shards = [manifest.shards.add(name=name) for name in ("a", "b")]
    for name, (dtype, shape, data) in model.items():
        for index, (offsets, sizes) in enumerate(cut(random, shape)):
            new, old = region(data, offsets, sizes), region(base[name][2], offsets, sizes)
            encoded = encode(new, old if random.random() < 0.8 else None, dtype)
            chosen = int(random.integers(2))
            entry = f"{name}.{index}"
            shards[chosen].tensors.add(
                name=name,
                dtype=dtype,
                global_shape=shape,
                offsets=offsets,
                sizes=sizes,
                encoding=pb.TensorEncoding.ValueType(encoded.encoding),
                digest=xxhash.xxh3_128(new.data).hexdigest(),
                entry=entry,
            )
            plain = encoded.encoding == Encoding.DENSE
            if encoded.encoding != Encoding.UNCHANGED:
                kind = (dtype, sizes) if plain else ("U8", (len(encoded.data),))
                contents[chosen].append((entry, *kind, bytes(encoded.data)))
    files = {shard.name: safetensors(rows) for shard, rows in zip(shards, contents, strict=True)}
    for shard in shards:
        shard.size_bytes = len(files[shard.name])
        shard.digest = xxhash.xxh3_128(files[shard.name]).hexdigest()
    manifest.digest = manifest_digest(manifest)
    return manifest, files


def safetensors(rows: Sequence[tuple[str, str, tuple[int, ...], bytes]]) -> bytes:
    entries = place([(name, dtype, shape) for name, dtype, shape, _ in rows])
    return render_header(entries) + b"".join(data for *_, data in rows)


def write(path: Path, model: Model) -> dict[str, Entry]:
    rows = [(name, dtype, shape, data.tobytes()) for name, (dtype, shape, data) in model.items()]
    path.write_bytes(safetensors(rows))
    return {entry.name: entry for entry in place([(name, dtype, shape) for name, dtype, shape, _ in rows])}


def received(manifest: pb.Manifest, files: dict[str, bytes]) -> list[DeltaShard]:
    shards = []
    for shard in manifest.shards:
        sink = DeltaShard(shard)
        for begin in range(0, len(files[shard.name]), 97):
            sink.feed(begin, memoryview(files[shard.name])[begin : begin + 97])
        sink.finish()
        shards.append(sink)
    return shards


def whole(model: Model) -> pb.Manifest:
    """Return the manifest of a dense file: one slice per tensor."""
    manifest = pb.Manifest(kind=pb.VERSION_KIND_ANCHOR)
    shard = manifest.shards.add(name="model")
    for name, (dtype, shape, data) in model.items():
        shard.tensors.add(
            name=name, dtype=dtype, global_shape=shape, digest=xxhash.xxh3_128(data.tobytes()).hexdigest()
        )
    return manifest


SHAPES = st.lists(
    st.tuples(
        st.sampled_from(["BF16", "F16", "F32", "I64", "U8"]),
        st.sampled_from([(), (0, 3), (1,), (40,), (6, 7), (3, 4, 5), (2, 1, 9)]),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@given(shapes=SHAPES, length=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_chain_of_deltas_makes_the_dense_file(
    tmp_path: Path, shapes: list[tuple[str, tuple[int, ...]]], length: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    model = new_model(random, shapes)
    path = tmp_path / "v.safetensors"
    write(path, model)
    with path.open("r+b") as file:
        patched = PatchedFile(file.fileno(), whole(model))
        for number in range(1, length + 1):
            base, model = model, step(random, model)
            manifest, files = delta(random, number, base, model)
            patched.apply(manifest, received(manifest, files), verify=number == length)
        patched.verify(whole_of(model))
        patched.close()
    write(tmp_path / "dense.safetensors", model)
    assert path.read_bytes() == (tmp_path / "dense.safetensors").read_bytes()


def whole_of(model: Model) -> pb.Manifest:
    manifest = whole(model)
    manifest.digest = manifest_digest(manifest)
    return manifest


Change = Callable[[pb.Manifest], None]


def changes() -> Iterator[tuple[str, Change]]:
    def digest(manifest: pb.Manifest) -> None:
        next(each for shard in manifest.shards for each in shard.tensors).digest = "0" * 32

    def version_digest(manifest: pb.Manifest) -> None:
        manifest.digest = "0" * 32

    def dtype(manifest: pb.Manifest) -> None:
        for shard in manifest.shards:
            for tensor in shard.tensors:
                tensor.dtype = "I16"

    def gap(manifest: pb.Manifest) -> None:
        shard = next(shard for shard in manifest.shards if shard.tensors)
        del shard.tensors[0]

    yield from {"digest": digest, "version digest": version_digest, "data type": dtype, "gap": gap}.items()


@pytest.mark.parametrize(("name", "change"), list(changes()))
def test_what_is_not_the_announced_version_is_refused(tmp_path: Path, name: str, change: Change) -> None:
    random = np.random.default_rng(0)
    base = new_model(random, [("BF16", (16, 8)), ("F32", (9,))])
    model = step(random, base)
    path = tmp_path / "v.safetensors"
    write(path, base)
    manifest, files = delta(random, 1, base, model)
    shards = received(manifest, files)
    change(manifest)
    with path.open("r+b") as file:
        patched = PatchedFile(file.fileno(), whole(base))
        with pytest.raises(StagingError):
            patched.apply(manifest, shards, verify=True)
        patched.close()


def test_a_delta_on_other_bytes_than_its_base_is_refused(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    base, other = (new_model(random, [("BF16", (64, 8))]) for _ in range(2))
    path = tmp_path / "v.safetensors"
    write(path, other)
    model = {name: (dtype, shape, data.copy()) for name, (dtype, shape, data) in base.items()}
    model["t0"][2][3, 4] ^= 1
    manifest, files = delta(random, 1, base, model)
    with path.open("r+b") as file:
        patched = PatchedFile(file.fileno(), None)
        with pytest.raises(StagingError):
            patched.apply(manifest, received(manifest, files), verify=True)
        patched.close()


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    base = new_model(random, [("F32", (8,))])
    model = step(random, base)
    model["t0"][2][3] = np.frombuffer(np.float32("nan").tobytes(), dtype=np.uint8)
    path = tmp_path / "v.safetensors"
    write(path, base)
    manifest, files = delta(random, 1, base, model)
    with path.open("r+b") as file:
        patched = PatchedFile(file.fileno(), None)
        with pytest.raises(StagingError, match="NaN"):
            patched.apply(manifest, received(manifest, files), verify=True)
        patched.close()


def test_a_shard_of_other_bytes_is_refused() -> None:
    random = np.random.default_rng(3)
    base = new_model(random, [("F32", (800,))])
    manifest, files = delta(random, 1, base, step(random, base))
    manifest.shards[0].digest = "0" * 32
    with pytest.raises(StagingError, match="digest"):
        received(manifest, files)


def test_unchanged_slices_that_are_known_are_not_read_again(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    base = new_model(random, [("F32", (8,))])
    path = tmp_path / "v.safetensors"
    entries = write(path, base)
    manifest, files = delta(random, 1, base, base)
    for shard in manifest.shards:
        for tensor in shard.tensors:
            tensor.encoding = pb.TENSOR_ENCODING_UNCHANGED
    del manifest.shards[:]
    shard = manifest.shards.add(name="a", size_bytes=len(safetensors([])))
    shard.digest = xxhash.xxh3_128(safetensors([])).hexdigest()
    shard.tensors.extend(whole(base).shards[0].tensors)
    shard.tensors[0].encoding = pb.TENSOR_ENCODING_UNCHANGED
    manifest.digest = manifest_digest(manifest)
    shards = received(manifest, {"a": safetensors([])})
    with path.open("r+b") as file:
        file.seek(-entries["t0"].size, 2)
        file.write(b"\1" * entries["t0"].size)  # never done in practice; it shows which bytes are read
        file.flush()
        known = PatchedFile(file.fileno(), whole(base))
        known.apply(manifest, shards, verify=True)
        known.close()
        unknown = PatchedFile(file.fileno(), None)
        with pytest.raises(StagingError, match="digest"):
            unknown.apply(manifest, shards, verify=True)
        unknown.close()
    assert files.keys() == {"a", "b"}
