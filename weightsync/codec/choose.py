"""Which encoding a slice gets, and how any of them is undone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightsync.codec.delta import BLOCK_LOG2, BLOCK_LOG2_SPARSE, apply_delta, encode_block, encode_delta
from weightsync.codec.encoding import CodecError, Encoded, Encoding
from weightsync.codec.integers import WIDTHS, Patterns, count_changed, patterns
from weightsync.codec.streams import compress, decompress
from weightsync.format.dtypes import DTYPES

__all__ = ["apply", "encode"]

_ZSTD_SAVES = 1 / 4
"""Part of the dense bytes that zstd must save to be worth its time on both ends. Trained bf16 weights save a fifth: they
stay dense; zeros, masks, tables and values of few bits are compressed."""
_DELTA_SUFFICES = 3 / 8
"""Share of the dense bytes up to which a delta is taken without trying zstd on the dense bytes."""
_SAMPLES = 4
_SAMPLE_ELEMENTS = 1 << 14
_SAMPLED_FROM = 16
"""A slice that is this many times longer than all samples is tried on them before all of it is encoded."""
_SPARSE = 1 / 16
"""Share of the dense size below which a delta gets longer blocks."""


def encode(new: NDArray[np.uint8], base: NDArray[np.uint8] | None, dtype: str) -> Encoded:
    """Encode one slice in the smallest way: UNCHANGED, DELTA, DENSE_ZSTD where it saves a quarter, or DENSE.

    Never larger than the dense bytes.

    Args:
        new: Dense little-endian bytes, one dimension, contiguous.
        base: Bytes of the same slice in the version that it is based on; None where there is none.
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
        encoding: How the data are encoded.
        data: The encoded bytes.
        target: Bytes of the base before, of the new version after; one dimension, contiguous, writable.
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
    """Size of a delta of the sampled places as a share of their dense size; 0 for short slices, which are always tried."""
    places = _places(new.size)
    if len(places) == 1:
        return 0.0
    sizes = (sum(map(len, encode_block(new[place], base[place])[0])) for place in places)
    return sum(sizes) / (_SAMPLES * _SAMPLE_ELEMENTS * new.itemsize)


def _sampled_frame(octets: NDArray[np.uint8]) -> float:
    """Size of the sampled places in zstd as a share of their dense size; 0 for short slices, which are always tried."""
    places = _places(octets.size)
    if len(places) == 1:
        return 0.0
    sample = np.concatenate([octets[place] for place in places])
    return len(compress(sample.data)) / sample.size


def _places(count: int) -> list[slice]:
    """Where a slice of `count` items is sampled: all of it if it is short."""
    if count < _SAMPLED_FROM * _SAMPLES * _SAMPLE_ELEMENTS:
        return [slice(0, count)]
    step = (count - _SAMPLE_ELEMENTS) // (_SAMPLES - 1)
    return [slice(start, start + _SAMPLE_ELEMENTS) for start in range(0, step * _SAMPLES, step)]
