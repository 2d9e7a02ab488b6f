"""Damaged and hostile data are refused: nothing outside the target is written, and nothing large is allocated for them."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.codec.slices import Encoding, apply, encode_delta
from weightsync.codec.streams import CodecError

COUNT = 3003
GUARD = 4096
BLOCK = 16
"""Where the first block begins."""
STREAMS = BLOCK + 8
"""Where its table of streams begins."""


def stream(seed: int, share: float, dtype: str = "<u2", far: bool = False) -> tuple[np.ndarray, bytes]:
    random = np.random.default_rng(seed)
    base = random.integers(0, 1 << 15, COUNT).astype(dtype)
    new = base.copy()
    where = random.choice(COUNT, max(int(COUNT * share), 1), replace=False)
    new[where] += random.choice(np.array([1, 2, -1, 77, 9000] if far else [1, -1]), where.size).astype(dtype)
    data, changed = encode_delta(new, base, 11)
    assert changed == where.size
    return base, data


STORED = [
    (dtype, *stream(seed, share, pattern, far))
    for seed, (share, far) in enumerate(
        [(0.001, False), (0.01, False), (0.1, True), (0.5, False), (0.5, True), (1.0, True)]
    )
    for dtype, pattern in (("BF16", "<u2"), ("F32", "<u4"))
]


def survives(data: bytes, base: np.ndarray, dtype: str) -> bool:
    """Apply between two guards; whether the data were accepted."""
    octets = base.view(np.uint8)
    memory = np.full(octets.size + 2 * GUARD, 0xA5, np.uint8)
    target = memory[GUARD:-GUARD]
    target[:] = octets
    try:
        apply(Encoding.DELTA, data, target, dtype)
        accepted = True
    except CodecError:
        accepted = False
    assert (memory[:GUARD] == 0xA5).all()
    assert (memory[-GUARD:] == 0xA5).all()
    return accepted


def with_number(data: bytes, offset: int, form: str, number: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, offset, number)
    return bytes(changed)


@pytest.mark.parametrize("stored", STORED)
def test_an_undamaged_stream_is_accepted(stored: tuple[str, np.ndarray, bytes]) -> None:
    dtype, base, data = stored
    assert survives(data, base, dtype)


@pytest.mark.slow
@settings(max_examples=600)
@given(
    st.sampled_from(STORED), st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 255)), min_size=1, max_size=4)
)
def test_flipped_bits_do_no_harm(stored: tuple[str, np.ndarray, bytes], flips: list[tuple[int, int]]) -> None:
    dtype, base, data = stored
    damaged = bytearray(data)
    for where, mask in flips:
        damaged[where % len(damaged)] ^= mask
    survives(bytes(damaged), base, dtype)


@settings(max_examples=300)
@given(st.sampled_from(STORED), st.integers(0, STREAMS + 80), st.integers(0, 255))
def test_any_header_byte_does_no_harm(stored: tuple[str, np.ndarray, bytes], where: int, value: int) -> None:
    dtype, base, data = stored
    damaged = bytearray(data)
    damaged[where % len(damaged)] = value
    survives(bytes(damaged), base, dtype)


@settings(max_examples=200)
@given(st.sampled_from(STORED), st.integers(1, 1 << 30))
def test_a_truncated_stream_is_refused(stored: tuple[str, np.ndarray, bytes], cut: int) -> None:
    dtype, base, data = stored
    assert not survives(data[: -(cut % len(data)) or 0], base, dtype)


@pytest.mark.parametrize("stored", STORED)
def test_bytes_left_over_are_refused(stored: tuple[str, np.ndarray, bytes]) -> None:
    dtype, base, data = stored
    assert not survives(data + b"\0", base, dtype)


@settings(max_examples=200)
@given(st.binary(max_size=300), st.sampled_from(["BF16", "F16", "F32"]))
def test_noise_behind_a_true_header_does_no_harm(noise: bytes, dtype: str) -> None:
    width = 4 if dtype == "F32" else 2
    header = struct.pack("<4sBBHQ", b"SLD1", width, 22, 0, COUNT)
    survives(header + noise, np.zeros(COUNT, f"<u{width}"), dtype)


@pytest.mark.parametrize(
    ("offset", "form", "number"),
    [
        pytest.param(0, "<I", 0, id="magic"),
        pytest.param(4, "<B", 4, id="width"),
        pytest.param(5, "<B", 25, id="block length"),
        pytest.param(5, "<B", 255, id="huge block length"),
        pytest.param(6, "<H", 1, id="reserved"),
        pytest.param(8, "<Q", COUNT + 1, id="elements"),
        pytest.param(8, "<Q", 2**64 - 1, id="huge number of elements"),
        pytest.param(BLOCK, "<I", 2**32 - 1, id="changes"),
        pytest.param(BLOCK + 4, "<B", 3, id="mode"),
        pytest.param(BLOCK + 5, "<B", 16, id="step bits"),
        pytest.param(BLOCK + 6, "<H", 1, id="reserved in block"),
        *(pytest.param(STREAMS + 4 * i, "<I", 2**32 - 1, id=f"stream length {i}") for i in range(10)),
        *(pytest.param(STREAMS + 4 * i, "<I", 2**31, id=f"half stream length {i}") for i in range(10)),
    ],
)
def test_an_impossible_header_is_refused_before_anything_is_allocated(offset: int, form: str, number: int) -> None:
    base, data = stream(1, 0.1, far=True)
    damaged = with_number(data, offset, form, number)
    tracemalloc.start()
    try:
        assert not survives(damaged, base, "BF16")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def one_block(gaps: bytes, steps: bytes, changed: int, mode: int = 0, frames: dict[int, bytes] | None = None) -> bytes:
    """A stream for COUNT bf16 values whose steps have two bits each, with stored bytes replaced on request."""
    streams = [gaps, b"", steps, b"", b""]
    stored = [(frames or {}).get(number, content) for number, content in enumerate(streams)]
    table = b"".join(struct.pack("<II", len(content), len(put)) for content, put in zip(streams, stored, strict=True))
    header = struct.pack("<4sBBHQ", b"SLD1", 2, 22, 0, COUNT)
    return header + struct.pack("<IBBH", changed, mode, 2, 0) + table + b"".join(stored)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(one_block(b"\xff" * 11 + bytes([COUNT - 11 * 255]), b"\0", 1), id="position behind the end"),
        pytest.param(one_block(b"\x05\xff", b"\0", 1), id="gap without an end"),
        pytest.param(one_block(b"\x05\x05", b"\0", 1), id="more gaps than changes"),
        pytest.param(one_block(b"\xff\x05", b"\0", 2), id="fewer gaps than changes"),
        pytest.param(one_block(bytes(375) + b"\x08", b"\0", 1, mode=255), id="bit behind the end"),
        pytest.param(one_block(b"\x05", b"\x03", 1), id="escape without a plane"),
        pytest.param(one_block(b"", b"", 1), id="no gaps"),
        pytest.param(one_block(b"\0" * 60, b"\0" * 15, 60, frames={0: b"not a frame"}), id="no frame"),
        pytest.param(
            one_block(b"\0" * 60, b"\0" * 15, 60, frames={0: zstandard.compress(b"\0" * 1_000_000)}),
            id="frame with more bytes than announced",
        ),
        pytest.param(
            one_block(
                b"\0" * 60,
                b"\0" * 15,
                60,
                frames={0: zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 60)},
            ),
            id="frame without a content size",
        ),
        pytest.param(
            one_block(b"\0" * 60, b"\0" * 15, 60, frames={0: zstandard.compress(b"\0" * 60) + b"\0"}),
            id="bytes behind a frame",
        ),
    ],
)
def test_streams_that_contradict_their_header_are_refused(data: bytes) -> None:
    assert not survives(data, np.zeros(COUNT, "<u2"), "BF16")


def test_the_last_element_can_be_reached() -> None:
    assert survives(one_block(b"\xff" * 11 + bytes([COUNT - 1 - 11 * 255]), b"\0", 1), np.zeros(COUNT, "<u2"), "BF16")


@pytest.mark.parametrize(
    ("encoding", "data", "dtype"),
    [
        pytest.param(Encoding.DENSE, b"\0" * 7, "BF16", id="short"),
        pytest.param(Encoding.DENSE, b"\0" * 9, "BF16", id="long"),
        pytest.param(Encoding.DENSE_ZSTD, b"", "BF16", id="empty frame"),
        pytest.param(Encoding.DENSE_ZSTD, zstandard.compress(b"\0" * 9), "BF16", id="frame of other size"),
        pytest.param(Encoding.DENSE_ZSTD, zstandard.compress(bytes(range(8)))[:-1], "BF16", id="truncated frame"),
        pytest.param(Encoding.UNCHANGED, b"\0", "BF16", id="bytes of an unchanged slice"),
        pytest.param(Encoding.DELTA, b"", "BF16", id="empty delta"),
        pytest.param(Encoding.DELTA, encode_delta(np.ones(4, "<u2"), np.zeros(4, "<u2"))[0], "I16", id="delta of I16"),
    ],
)
def test_data_of_another_slice_are_refused(encoding: Encoding, data: bytes, dtype: str) -> None:
    target = np.arange(8, dtype=np.uint8)
    with pytest.raises(CodecError):
        apply(encoding, data, target, dtype)
    assert target.tolist() == list(range(8))
