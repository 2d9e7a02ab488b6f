"""How one slice is encoded, and how any encoding is undone; the bytes are described in docs/delta-format.md.

A slice travels in the smallest of four ways: not at all because it did not change, as its difference from the base (DELTA), as
its dense bytes compressed by zstd, or as its dense bytes. A delta is a header, then blocks that can each be decoded alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import xxhash
from numpy.typing import NDArray

from sluice.v1 import weightsync_pb2 as pb
from weightsync.codec.streams import (
    STEP_BITS,
    WIDTHS,
    CodecError,
    Patterns,
    changed_positions,
    check_lengths,
    choose_bits,
    choose_mode,
    compress,
    count_changed,
    decompress,
    pack,
    packed_size,
    patterns,
    read_codes,
    read_positions,
    step_codes,
    take_steps,
    unpack,
    write_codes,
    write_positions,
)
from weightsync.format.manifest import box
from weightsync.format.safetensors import DTYPES, all_finite

_ZSTD_SAVES = 1 / 4
"""Fraction of the dense bytes that zstd must save to be worth its time on both ends. On trained bf16 weights it saves a fifth,
so they stay dense; zeros, masks, tables and values of few bits are compressed."""
_DELTA_SUFFICES = 3 / 8
"""Share of the dense bytes up to which a delta is taken without trying zstd on the dense bytes."""
_SAMPLES = 4
_SAMPLE_ELEMENTS = 1 << 14
_SAMPLED_FROM = 16
"""A slice that is at least this many times longer than all its samples together is tried on the samples first."""
_SPARSE = 1 / 16
"""Share of the dense size below which a delta gets longer blocks."""

BLOCK_LOG2 = 20
"""Log2 of the elements of a block. If all elements of a block change, its arrays are a few MiB each."""
BLOCK_LOG2_SPARSE = 22
"""The same if few elements change: longer blocks keep the tables a small part of the streams."""
_BLOCK_LOG2_LIMITS = range(8, 25)

_MAGIC = b"SLD1"
_HEADER = struct.Struct("<4sBBHQ")
"""Magic, bytes per element, log2 of the block's elements, zero, elements."""
_CHANGED = struct.Struct("<I")
_MODES = struct.Struct("<BBH")
"""Mode of the positions, bits per packed step, zero."""
_LENGTHS = struct.Struct("<II")
"""Bytes of a stream, bytes as it is stored."""


class Encoding(IntEnum):
    """Encoding of a slice; the numbers are those of `sluice.v1.TensorEncoding`."""

    DENSE = 1
    """The bytes as safetensors lays them out."""
    DENSE_ZSTD = 2
    """DENSE as one zstd frame."""
    DELTA = 3
    """What differs from the base; see `encode_delta`."""
    UNCHANGED = 4
    """The bytes of the base."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One slice as it travels.

    Attributes:
        data: Empty for UNCHANGED, a view of the caller's bytes for DENSE.
        changed: Elements whose bit pattern differs from the base's; all of them where there is no base.
    """

    encoding: Encoding
    data: bytes | memoryview
    changed: int


def encode(new: NDArray[np.uint8], base: NDArray[np.uint8] | None, dtype: str) -> Encoded:
    """Encode one slice in the smallest way: UNCHANGED, DELTA, DENSE_ZSTD where it saves a quarter, or DENSE.

    Never larger than the dense bytes.

    Args:
        new: Dense little-endian bytes, one dimension, contiguous.
        base: Bytes of the same slice in the previous version; None for a slice without a base.
        dtype: Data type as safetensors names it.

    Raises:
        ValueError: if the type is unknown or the arrays do not fit it and each other.
    """
    size = _element_size(new, dtype)
    if base is None:
        return _encode_dense(new, new.size // size)
    if base.shape != new.shape or _element_size(base, dtype) != size:
        raise ValueError(f"base has {base.size} bytes and new has {new.size}; give the same slice of both versions")
    if dtype not in WIDTHS:
        changed = count_changed(new, base, size)
        return _encode_dense(new, changed) if changed else Encoded(Encoding.UNCHANGED, b"", 0)
    return _encode_float(new, base, WIDTHS[dtype])


def apply(encoding: Encoding, data: bytes | memoryview, target: NDArray[np.uint8], dtype: str) -> None:
    """Turn a slice's base bytes into the new ones, in place.

    Args:
        encoding: How `data` are encoded.
        data: The encoded bytes.
        target: On entry the base's bytes, on return the new version's; one dimension, contiguous, writable.
        dtype: Data type as safetensors names it.

    Raises:
        CodecError: if the data are damaged or do not fit the target, whose content is undefined then. Bytes outside
            the target are never written, and no more is allocated than a few times its size.
        ValueError: if the type is unknown or the target does not fit it.
    """
    _element_size(target, dtype)
    if not target.flags.writeable:
        raise ValueError("the target cannot be written; give a writable copy of the base")
    view = memoryview(data)
    if encoding == Encoding.UNCHANGED:
        if view.nbytes:
            raise CodecError(f"{view.nbytes} bytes belong to a slice that is announced as unchanged")
    elif encoding == Encoding.DELTA:
        if dtype not in WIDTHS:
            raise CodecError(f"{dtype} has no delta encoding; pull the dense form")
        apply_delta(view, patterns(target, WIDTHS[dtype]))
    elif encoding == Encoding.DENSE_ZSTD:
        target[:] = np.frombuffer(decompress(view, target.size), np.uint8)
    elif encoding == Encoding.DENSE:
        if view.nbytes != target.size:
            raise CodecError(f"a dense slice has {view.nbytes} bytes, its place has {target.size}")
        target[:] = np.frombuffer(view, np.uint8)
    else:
        raise CodecError(f"encoding {encoding} is not known to this release; update it")


def apply_slice(whole: NDArray[np.uint8], tensor: pb.TensorSlice, data: memoryview) -> NDArray[np.uint8]:
    """Apply an encoded slice in place to the bytes of its whole tensor: dense, one dimension, contiguous, writable.

    `data` is empty for UNCHANGED. Return the slice's dense bytes after that, as `slice_bytes`; raise CodecError as `apply`.
    """
    region = slice_region(whole, tensor)
    flat = np.ascontiguousarray(region).reshape(-1)
    encoding = Encoding(tensor.encoding or pb.TENSOR_ENCODING_DENSE)
    apply(encoding, data, flat, tensor.dtype)
    if not region.flags.c_contiguous and encoding is not Encoding.UNCHANGED:
        region[...] = flat.reshape(region.shape)
    return flat


def slice_region(whole: NDArray[np.uint8], tensor: pb.TensorSlice) -> NDArray[np.uint8]:
    """Return a view of a slice in the bytes of its whole tensor. The last dimension is the bytes of an element."""
    octets = whole.reshape(*tensor.global_shape, DTYPES[tensor.dtype].size)
    return octets[tuple(slice(offset, offset + size) for offset, size in zip(*box(tensor), strict=True))]


def slice_bytes(whole: NDArray[np.uint8], tensor: pb.TensorSlice) -> NDArray[np.uint8]:
    """Return the dense bytes of a slice of a tensor: a view of `whole` if they are contiguous there, else a copy."""
    return np.ascontiguousarray(slice_region(whole, tensor)).reshape(-1)


def check_slice(tensor: pb.TensorSlice, dense: NDArray[np.uint8]) -> None:
    """Raise CodecError if a slice's dense bytes have another digest than described, or a value is NaN or infinite."""
    digest = xxhash.xxh3_128(dense.data).hexdigest()
    if digest != tensor.digest:
        raise CodecError(f"a slice of {tensor.name} has digest {digest}, announced was {tensor.digest}")
    if not all_finite(dense.data, DTYPES[tensor.dtype]):
        raise CodecError(f"tensor {tensor.name} holds NaN or infinite values")


def _element_size(octets: NDArray[np.uint8], dtype: str) -> int:
    known = DTYPES.get(dtype)
    if known is None:
        raise ValueError(f"data type {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    if octets.dtype != np.uint8 or octets.ndim != 1 or not octets.flags.c_contiguous or octets.size % known.size:
        raise ValueError(f"give whole {dtype} elements as contiguous bytes of one dimension")
    return known.size


def _encode_float(new: NDArray[np.uint8], base: NDArray[np.uint8], width: int) -> Encoded:
    patterns_new, patterns_base = patterns(new, width), patterns(base, width)
    promised = _sampled_delta(patterns_new, patterns_base)
    if promised < 1:
        block_log2 = BLOCK_LOG2_SPARSE if promised < _SPARSE else BLOCK_LOG2
        stream, changed = encode_delta(patterns_new, patterns_base, block_log2)
    else:
        stream, changed = None, count_changed(new, base, width)
    if not changed:
        return Encoded(Encoding.UNCHANGED, b"", 0)
    if stream is not None and len(stream) <= new.size * _DELTA_SUFFICES:
        return Encoded(Encoding.DELTA, stream, changed)
    dense = _encode_dense(new, changed)
    return dense if stream is None or len(stream) >= len(dense.data) else Encoded(Encoding.DELTA, stream, changed)


def _encode_dense(new: NDArray[np.uint8], changed: int) -> Encoded:
    most = 1 - _ZSTD_SAVES
    if _sampled_frame(new) <= most:
        frame = compress(new.data)
        if len(frame) <= new.size * most:
            return Encoded(Encoding.DENSE_ZSTD, frame, changed)
    return Encoded(Encoding.DENSE, new.data, changed)


def _sampled_delta(new: Patterns, base: Patterns) -> float:
    """Return the size of a delta of the samples as a fraction of their dense size.

    0 for short slices, for which a delta is always tried.
    """
    places = _places(new.size)
    if len(places) == 1:
        return 0.0
    sizes = (sum(map(len, encode_block(new[place], base[place])[0])) for place in places)
    return sum(sizes) / (_SAMPLES * _SAMPLE_ELEMENTS * new.itemsize)


def _sampled_frame(octets: NDArray[np.uint8]) -> float:
    """Return the size of the samples after zstd as a fraction of their dense size.

    0 for short slices, for which zstd is always tried.
    """
    places = _places(octets.size)
    if len(places) == 1:
        return 0.0
    sample = np.concatenate([octets[place] for place in places])
    return len(compress(sample.data)) / sample.size


def _places(count: int) -> list[slice]:
    """Return where a slice of `count` items is sampled: all of it if it is short."""
    if count < _SAMPLED_FROM * _SAMPLES * _SAMPLE_ELEMENTS:
        return [slice(0, count)]
    step = (count - _SAMPLE_ELEMENTS) // (_SAMPLES - 1)
    return [slice(start, start + _SAMPLE_ELEMENTS) for start in range(0, step * _SAMPLES, step)]


def encode_delta(new: Patterns, base: Patterns, block_log2: int = BLOCK_LOG2) -> tuple[bytes, int]:
    """Encode what differs in blocks of `2^block_log2` elements; return the stream, and the number of elements that differ.

    Args:
        new: Bit patterns.
        base: Bit patterns, of the same type and length.
        block_log2: Elements of a block, as a power of two.
    """
    parts: list[bytes | memoryview] = [_HEADER.pack(_MAGIC, new.itemsize, block_log2, 0, new.size)]
    total = 0
    for start in range(0, new.size, 1 << block_log2):
        block, changed = encode_block(new[start : start + (1 << block_log2)], base[start : start + (1 << block_log2)])
        parts += block
        total += changed
    return b"".join(parts), total


def encode_block(new: Patterns, base: Patterns) -> tuple[list[bytes | memoryview], int]:
    """Encode one block: its bytes in parts, and the number of elements that differ."""
    positions = changed_positions(new, base)
    if not positions.size:
        return [_CHANGED.pack(0)], 0
    codes = step_codes(new[positions], base[positions])
    mode, bits = choose_mode(positions.size, new.size), choose_bits(codes)
    gaps, lows = write_positions(positions, new.size, mode)
    packed, planes = write_codes(codes, bits)
    streams = [gaps, lows, packed, *planes]
    stored = [pack(stream.data) for stream in streams]
    lengths = (_LENGTHS.pack(len(stream), len(each)) for stream, each in zip(streams, stored, strict=True))
    return [_CHANGED.pack(positions.size), _MODES.pack(mode, bits, 0), *lengths, *stored], positions.size


def apply_delta(data: memoryview, target: Patterns) -> None:
    """Apply a stream in place to the bit patterns of its base, which are writable.

    Raises:
        CodecError: if the data are not a stream for this target. The blocks before the damaged one are already applied.
    """
    block = _read_header(data, target)
    reader = _Reader(data, _HEADER.size)
    for start in range(0, target.size, block):
        _apply_block(reader, target[start : start + block])
    if reader.offset != len(data):
        raise CodecError("bytes follow the last block of a delta; pull the version again")


def _read_header(data: memoryview, target: Patterns) -> int:
    if len(data) < _HEADER.size:
        raise CodecError("a delta is shorter than its header; pull the version again")
    magic, width, block_log2, zero, elements = _HEADER.unpack_from(data)
    if magic != _MAGIC or zero or block_log2 not in _BLOCK_LOG2_LIMITS:
        raise CodecError("a delta has a header that this release does not know; update it, or pull the version again")
    if (width, elements) != (target.itemsize, target.size):
        raise CodecError(
            f"a delta of {elements} elements of {width} bytes cannot be applied to {target.size} elements of"
            f" {target.itemsize} bytes; pull the dense form"
        )
    return 1 << int(block_log2)


@dataclass(slots=True)
class _Reader:
    """Goes through the bytes, never beyond their end."""

    data: memoryview
    offset: int

    def take(self, size: int) -> memoryview:
        end = self.offset + size
        if end > len(self.data):
            raise CodecError("a delta ends within a block; pull the version again")
        taken = self.data[self.offset : end]
        self.offset = end
        return taken


def _apply_block(reader: _Reader, target: Patterns) -> None:
    (changed,) = _CHANGED.unpack(reader.take(_CHANGED.size))
    if not changed:
        return
    mode, bits, zero = _MODES.unpack(reader.take(_MODES.size))
    width = target.itemsize
    lengths = [_LENGTHS.unpack(reader.take(_LENGTHS.size)) for _ in range(3 + width)]
    if changed > target.size or bits not in STEP_BITS or zero:
        raise CodecError("a block of a delta has an impossible header; pull the version again")
    _check_streams(lengths, changed, target.size, mode, bits)
    gaps, lows, packed, *planes = (_unpacked(reader, size, stored) for size, stored in lengths)
    positions = read_positions(gaps, lows, changed, target.size, mode)
    codes = read_codes(packed, planes, changed, bits)
    target[positions] = take_steps(target[positions], codes)


def _check_streams(lengths: list[tuple[int, int]], changed: int, elements: int, mode: int, bits: int) -> None:
    gaps, lows, packed, *planes = (size for size, _ in lengths)
    check_lengths(mode, changed, elements, gaps, lows)
    if packed != packed_size(changed, bits) or planes[0] > changed or len(set(planes)) != 1:
        raise CodecError("the streams of steps have impossible lengths; pull the version again")
    if any(stored > size for size, stored in lengths):
        raise CodecError("a stream is stored in more bytes than it has; pull the version again")


def _unpacked(reader: _Reader, size: int, stored: int) -> NDArray[np.uint8]:
    return np.frombuffer(unpack(reader.take(stored), size), np.uint8)
