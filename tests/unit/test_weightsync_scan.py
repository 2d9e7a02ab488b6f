"""One pass over a file in any cuts finds what safetensors and torch find."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from weightsync_stack import ShardSource, read_source

from weightsync.format.safetensors import DTYPES, LayoutError, Scan, all_finite, parse_header, place, render_header
from weightsync.publish.shards import local_slices

TENSORS = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "brain": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(3, 0),
    "flags": torch.tensor([True, False, True]),
}
FLOATS = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def scan(data: bytes, cuts: list[int]) -> Scan:
    result = Scan(len(data))
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        result.feed(data[begin:end])
    return result


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_digests_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    found = scan(save(TENSORS), cuts)
    assert found.complete
    expected = {
        name: xxhash.xxh3_128(each.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, each in TENSORS.items()
    }
    assert {name: each.digest for name, each in found.tensors.items()} == expected
    assert all(each.finite for each in found.tensors.values())


@given(
    st.sampled_from(sorted(FLOATS)),
    st.integers(0, 40),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 448.0]),
    st.lists(st.integers(0, 10_000), max_size=6),
)
def test_one_value_that_is_not_finite_is_found_wherever_the_chunks_end(
    dtype: str, position: int, value: float, cuts: list[int]
) -> None:
    tensor = torch.zeros(41, dtype=FLOATS[dtype])
    tensor[position] = torch.tensor(value).to(FLOATS[dtype])
    finite = bool(torch.isfinite(tensor.double()).all())
    assert scan(save({"pad": torch.zeros(3, dtype=torch.uint8), "w": tensor}), cuts).tensors["w"].finite is finite


@given(st.binary(min_size=8, max_size=512), st.sampled_from(sorted(FLOATS)))
def test_finiteness_agrees_with_torch_on_arbitrary_bits(raw: bytes, dtype: str) -> None:
    raw = raw[: len(raw) // 8 * 8]
    expected = torch.isfinite(torch.frombuffer(bytearray(raw), dtype=FLOATS[dtype]).double()).all()
    assert all_finite(raw, DTYPES[dtype]) == bool(expected)


def test_integers_are_always_finite() -> None:
    assert all(all_finite(b"\xff" * 64, DTYPES[name]) for name in ("I64", "U8", "BOOL", "I32", "U16"))


def test_values_in_later_blocks_are_looked_at() -> None:
    values = np.zeros(1_000_000, dtype=np.float32)
    values[-1] = np.inf
    assert not all_finite(values.tobytes(), DTYPES["F32"])


@pytest.mark.parametrize(
    "row",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        "nonsense",
    ],
)
def test_headers_that_lie_are_refused(row: object) -> None:
    with pytest.raises(LayoutError):
        parse_header(json.dumps({"w": row}).encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b'{"a b": {}}'])
def test_headers_that_are_none_are_refused(text: bytes) -> None:
    with pytest.raises(LayoutError):
        parse_header(text)


@pytest.mark.parametrize("change", [-1, 1, 100])
def test_a_file_of_another_size_than_announced_is_refused(change: int) -> None:
    data = save(TENSORS)
    result = Scan(len(data) + change)
    with pytest.raises(LayoutError):
        result.feed(data + bytes(max(0, change)))


def test_a_header_beyond_the_file_is_refused_before_it_is_collected() -> None:
    with pytest.raises(LayoutError):
        Scan(1000).feed((1 << 60).to_bytes(8, "little"))


def test_a_file_that_was_never_written_reads_as_safetensors() -> None:
    tensors = TENSORS | {"transposed": torch.randn(4, 6).t(), "view": torch.randn(9, 4)[2:5]}
    source = ShardSource("model", tensors)
    whole = read_source(source, 0, source.size)
    loaded = load(whole)
    assert loaded.keys() == tensors.keys()
    assert all(loaded[name].equal(each) for name, each in tensors.items())
    assert b"".join(read_source(source, begin, end) for begin, end in source.spans(0, 13)) == whole
    assert source.digest() == xxhash.xxh3_128(whole).hexdigest()
    assert {name: each.digest for name, each in scan(whole, [50]).tensors.items()} == source.tensor_digests()
    assert all(each.begin % DTYPES[each.dtype].size == 0 for each in source.entries)


def test_tensors_that_cannot_travel_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"w has data type torch\.complex64"):
        local_slices({"w": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(ValueError, match="w is a"):
        local_slices({"w": torch.zeros(1, device="meta")})


def test_a_header_fills_the_room_that_was_kept_for_it() -> None:
    entries = place([("a", "F32", (2,))])
    assert len(render_header(entries, length=4096)) == 4096
    assert load(render_header(entries, length=4096) + bytes(8))["a"].shape == (2,)
    with pytest.raises(LayoutError):
        render_header(entries, length=16)
