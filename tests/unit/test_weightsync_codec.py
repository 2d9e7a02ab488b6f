"""Whatever changes between versions of a tensor, applying the encoded differences gives the dense bytes, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sluice.v1 import weightsync_pb2 as pb
from weightsync.codec.slices import (
    Encoded,
    Encoding,
    apply,
    apply_delta,
    apply_slice,
    check_slice,
    encode,
    encode_delta,
    slice_bytes,
)
from weightsync.codec.streams import CodecError, step_codes, take_steps
from weightsync.format.safetensors import DTYPES

Octets = NDArray[np.uint8]
FLOATS = {"BF16": 2, "F16": 2, "F32": 4}
EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000}


def special(dtype: str) -> list[int]:
    """Both zeros, the smallest and largest subnormals and finite values, infinities, NaNs with several payloads."""
    infinity, sign = EXPONENT[dtype], 1 << (8 * FLOATS[dtype] - 1)
    ulp = infinity & -infinity
    positive = [0, 1, ulp - 1, ulp, infinity - 1, infinity, infinity + 1, infinity + ulp // 2, sign - 1]
    return positive + [sign | each for each in positive]


@st.composite
def chains(draw: st.DrawFn) -> tuple[str, list[Octets]]:
    """Draw versions of one tensor, each made from the previous one by an edit."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    width = DTYPES[dtype].size
    count = draw(st.sampled_from([0, 1, 2, 3, 9, 255, 256, 257, 1000, 5000]) | st.integers(0, 3000))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    versions = [random.integers(0, 256, count * width, np.uint8)]
    for _ in range(draw(st.integers(1, 4))):
        elements = versions[-1].copy().view(f"<u{width}")
        share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]))
        where = np.flatnonzero(random.random(count) < share)
        where = np.union1d(where, draw(st.sampled_from([[], [0], [count - 1]])) if count else []).astype(np.int64)
        change = draw(st.sampled_from(["ulp", "far", "special", "zero"]))
        if change == "ulp":
            elements[where] += random.choice(np.array([1, 2, 3, -1, -2, -300]), where.size).astype(elements.dtype)
        elif change == "far":
            elements[where] = random.integers(0, 256, where.size * width, np.uint8).view(elements.dtype)
        elif change == "special" and dtype in FLOATS:
            elements[where] = random.choice(np.array(special(dtype), elements.dtype), where.size)
        else:
            elements[where] = 0
        versions.append(elements.view(np.uint8))
    return dtype, versions


def applied(encoded: Encoded, base: Octets, dtype: str) -> Octets:
    target = base.copy()
    apply(encoded.encoding, encoded.data, target, dtype)
    return target


@pytest.mark.slow
@settings(max_examples=300)
@given(chains())
def test_a_chain_of_differences_gives_the_dense_bytes(chain: tuple[str, list[Octets]]) -> None:
    dtype, versions = chain
    held = versions[0].copy()
    for base, new in itertools.pairwise(versions):
        encoded = encode(new, base, dtype)
        apply(encoded.encoding, encoded.data, held, dtype)
        pattern = f"<u{DTYPES[dtype].size}"
        assert held.tobytes() == new.tobytes()
        assert encoded.changed == np.count_nonzero(new.view(pattern) != base.view(pattern))
        assert (encoded.encoding is Encoding.UNCHANGED) == (encoded.changed == 0)
        assert len(encoded.data) <= new.size


@settings(max_examples=100)
@given(chains())
def test_a_version_without_a_base_travels_whole(chain: tuple[str, list[Octets]]) -> None:
    dtype, versions = chain
    encoded = encode(versions[0], None, dtype)
    assert encoded.encoding in {Encoding.DENSE, Encoding.DENSE_ZSTD}
    assert encoded.changed == versions[0].size // DTYPES[dtype].size
    assert applied(encoded, versions[-1], dtype).tobytes() == versions[0].tobytes()


@pytest.mark.slow
@settings(max_examples=200)
@given(chains(), st.integers(8, 12))
def test_blocks_of_any_length_give_the_dense_bytes(chain: tuple[str, list[Octets]], block_log2: int) -> None:
    dtype, versions = chain
    if dtype not in FLOATS:
        return
    base, new = (version.view(f"<u{FLOATS[dtype]}") for version in versions[:2])
    stream, changed = encode_delta(new, base, block_log2)
    target = base.copy()
    apply_delta(memoryview(stream), target)
    assert target.tobytes() == new.tobytes()
    assert changed == np.count_nonzero(new != base)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_special_value_turns_into_every_other(dtype: str) -> None:
    values = np.array(special(dtype), f"<u{FLOATS[dtype]}")
    base, new = np.repeat(values, values.size).view(np.uint8), np.tile(values, values.size).view(np.uint8)
    stream, _ = encode_delta(new.view(values.dtype), base.view(values.dtype))
    assert applied(Encoded(Encoding.DELTA, stream, 0), base, dtype).tobytes() == new.tobytes()


def test_neighbouring_values_are_one_step_apart() -> None:
    values = np.array([-np.inf, -1, -(2.0**-149), -0.0, 0.0, 2.0**-149, 1], np.float32)
    above = np.array([-3.4028235e38, np.nextafter(np.float32(-1), 0), -0.0, 0.0, 2.0**-149, 2.0**-148, 1 + 2.0**-23])
    base, new = values.view("<u4"), above.astype(np.float32).view("<u4")
    assert step_codes(new, base).tolist() == [1] * 7
    assert step_codes(base, new).tolist() == [0] * 7


def test_steps_across_the_whole_range_are_exact() -> None:
    every = np.arange(2**16, dtype="<u2")
    for base in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        new = every[every != base]
        same = np.full_like(new, base)
        codes = step_codes(new, same)
        assert np.unique(codes).size == new.size
        assert np.array_equal(take_steps(same, codes), new)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "where",
    [[0], [-1], [0, -1], [254], [255], [256], [0, 255], [0, 256], [0, 257], [510, 511], [65_535, 131_072], range(3000)],
)
def test_changes_however_far_apart_are_found(dtype: str, where: list[int]) -> None:
    base = np.zeros(600_011, f"<u{FLOATS[dtype]}")
    new = base.copy()
    new[where] = 0x8000
    encoded = encode(new.view(np.uint8), base.view(np.uint8), dtype)
    assert encoded.encoding is Encoding.DELTA
    assert encoded.changed == len(where)
    assert np.array_equal(applied(encoded, base.view(np.uint8), dtype), new.view(np.uint8))


def test_changes_at_the_edges_of_blocks_are_found() -> None:
    block = 1 << 22
    base = np.zeros(2 * block + 5, "<u2")
    new = base.copy()
    new[[0, block - 1, block, 2 * block - 1, 2 * block, 2 * block + 4]] = 1
    encoded = encode(new.view(np.uint8), base.view(np.uint8), "BF16")
    assert encoded.encoding is Encoding.DELTA
    assert encoded.changed == 6
    assert np.array_equal(applied(encoded, base.view(np.uint8), "BF16"), new.view(np.uint8))


def test_bytes_need_no_alignment() -> None:
    random = np.random.default_rng(0)
    memory = random.integers(0, 256, 4 * 1000 + 3, np.uint8)
    base = memory[3:]
    new = memory[:-3].copy()
    new[:] = base
    new[[5, 900]] ^= 1
    encoded = encode(new, base, "F32")
    assert encoded.encoding is Encoding.DELTA
    apply(encoded.encoding, encoded.data, base, "F32")
    assert base.tobytes() == new.tobytes()


def test_what_is_no_slice_is_refused_with_a_remedy() -> None:
    octets = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="use one of BOOL"):
        encode(octets, None, "F12")
    with pytest.raises(ValueError, match="contiguous"):
        encode(np.zeros(16, np.uint8)[::2], None, "F32")
    with pytest.raises(ValueError, match="whole F64 elements"):
        encode(octets[:4], None, "F64")
    with pytest.raises(ValueError, match="same slice"):
        encode(octets, octets[:4], "F32")
    octets.flags.writeable = False
    with pytest.raises(ValueError, match="writable copy"):
        apply(Encoding.UNCHANGED, b"", octets, "F32")


def test_a_slice_of_columns_is_applied_within_its_tensor_and_checked() -> None:
    random = np.random.default_rng(0)
    before, after = (random.standard_normal((6, 8)).astype("<f4") for _ in range(2))
    whole = before.view(np.uint8).reshape(-1).copy()
    dense = np.ascontiguousarray(after[1:5, 2:5]).view(np.uint8).reshape(-1)
    base = np.ascontiguousarray(before[1:5, 2:5]).view(np.uint8).reshape(-1)
    encoded = encode(dense, base, "F32")
    tensor = pb.TensorSlice(
        name="w", dtype="F32", global_shape=(6, 8), offsets=(1, 2), sizes=(4, 3), encoding=int(encoded.encoding)
    )
    tensor.digest = xxhash.xxh3_128(dense.data).hexdigest()
    check_slice(tensor, apply_slice(whole, tensor, memoryview(encoded.data)))
    expected = before.copy()
    expected[1:5, 2:5] = after[1:5, 2:5]
    assert np.array_equal(whole.view("<f4").reshape(6, 8), expected)
    assert np.array_equal(slice_bytes(whole, tensor), dense)
    with pytest.raises(CodecError, match="announced was"):
        check_slice(tensor, base)
