"""The golden vectors of docs/delta-format.md hold for our decoder and for a naive one that was written from that page alone.

A change that fails here breaks every stored delta and every decoder in another language: make a new magic instead of new vectors.
A further vector is a file of the same form: `data` is the hexadecimal stream, as `weightsync.codec.slices.encode` or `encode_delta` wrote it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard

from weightsync.codec.slices import Encoding, apply, encode

VECTORS = sorted((Path(__file__).parent / "vectors" / "delta").glob("*.json"))
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}


def load(path: Path) -> tuple[str, bytes, bytes, bytes]:
    vector = json.loads(path.read_text())
    return vector["dtype"], *(bytes.fromhex(vector[part]) for part in ("base", "data", "result"))


def unpack(packed: bytes, count: int, bits: int) -> list[int]:
    return [packed[i * bits // 8] >> (i * bits % 8) & ((1 << bits) - 1) for i in range(count)]


def positions_of(gaps: bytes, lows: bytes, mode: int, changed: int, elements: int) -> list[int]:
    if mode == 255:
        return [i for i, bit in enumerate(unpack(gaps, elements, 1)) if bit]
    found, position, rest = [], -1, iter(gaps)
    for low in unpack(lows, changed, mode) if mode else [0] * changed:
        high = 0
        while (byte := next(rest)) == 255:
            high += 255
        position += 1 + ((high + byte) << mode | low)
        found.append(position)
    return found


def codes_of(steps: bytes, planes: list[bytes], bits: int, changed: int) -> list[int]:
    wide = iter(zip(*planes, strict=True))
    escape = (1 << bits) - 1
    small = unpack(steps, changed, bits) if bits else [0] * changed
    return [int.from_bytes(next(wide), "little") if code == escape else code for code in small]


def monotone(pattern: int, bits: int) -> int:
    sign = 1 << (bits - 1)
    return pattern if pattern < sign else (pattern ^ (sign - 1)) - (1 << bits)


def stepped(pattern: int, code: int, bits: int) -> int:
    zigzag = code + 1
    step = zigzag // 2 if zigzag % 2 == 0 else -(zigzag + 1) // 2
    moved = (monotone(pattern, bits) + step) % (1 << bits)
    return moved if moved < 1 << (bits - 1) else moved ^ ((1 << (bits - 1)) - 1)


def naive(data: bytes, base: bytes) -> bytes:
    magic, width, block_log2, zero, elements = struct.unpack_from("<4sBBHQ", data)
    assert (magic, zero) == (b"SLD1", 0)
    values = [int.from_bytes(base[i : i + width], "little") for i in range(0, len(base), width)]
    assert len(values) == elements
    at = 16
    for start in range(0, elements, 1 << block_log2):
        (changed,) = struct.unpack_from("<I", data, at)
        at += 4
        if not changed:
            continue
        mode, bits, _ = struct.unpack_from("<BBH", data, at)
        sizes = struct.unpack_from(f"<{2 * (3 + width)}I", data, at + 4)
        at += 4 + 8 * (3 + width)
        streams = []
        for size, stored in zip(sizes[::2], sizes[1::2], strict=True):
            piece = data[at : at + stored]
            streams.append(piece if stored == size else zstandard.decompress(piece))
            assert len(streams[-1]) == size
            at += stored
        gaps, lows, steps, *planes = streams
        block = min(1 << block_log2, elements - start)
        positions = positions_of(gaps, lows, mode, changed, block)
        for position, code in zip(positions, codes_of(steps, planes, bits, changed), strict=True):
            values[start + position] = stepped(values[start + position], code, 8 * width)
    assert at == len(data)
    return b"".join(value.to_bytes(width, "little") for value in values)


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_a_vector_decodes_to_its_result(path: Path) -> None:
    dtype, base, data, result = load(path)
    target = np.frombuffer(bytearray(base), np.uint8)
    apply(Encoding.DELTA, data, target, dtype)
    assert target.tobytes() == result


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_a_decoder_written_from_the_document_agrees(path: Path) -> None:
    _, base, data, result = load(path)
    assert naive(data, base) == result


def test_the_vectors_reach_every_part_of_the_format() -> None:
    seen: set[tuple[str, object]] = set()
    for path in VECTORS:
        dtype, _, data, _ = load(path)
        changed, mode, bits, _, *sizes = struct.unpack_from(f"<IBBH{2 * (3 + WIDTHS[dtype])}I", data, 16)
        assert changed
        seen |= {("dtype", dtype), ("mode", mode), ("bits", bits)}
        seen |= {("zstd", size != stored) for size, stored in zip(sizes[::2], sizes[1::2], strict=True)}
    assert seen == {
        *(("dtype", dtype) for dtype in WIDTHS),
        *(("mode", mode) for mode in (0, 2, 4, 8, 255)),
        *(("bits", bits) for bits in (0, 2, 4, 8)),
        *(("zstd", used) for used in (False, True)),
    }


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("changed", [1, 40, 700, 3000])
def test_a_decoder_written_from_the_document_reads_what_we_write(dtype: str, changed: int) -> None:
    random = np.random.default_rng(changed)
    base = random.integers(0, 256, 3000 * WIDTHS[dtype], np.uint8)
    new = base.copy()
    elements = new.reshape(-1, WIDTHS[dtype])
    elements[random.choice(3000, changed, replace=False), 0] ^= 1
    encoded = encode(new, base, dtype)
    assert encoded.encoding is Encoding.DELTA
    assert naive(bytes(encoded.data), base.tobytes()) == new.tobytes()
