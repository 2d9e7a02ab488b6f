"""One stream of bytes as a zstd frame, or as it is where zstd finds nothing in it."""

from __future__ import annotations

import threading

import zstandard

from weightsync.codec.encoding import CodecError

__all__ = ["compress", "decompress", "pack", "unpack"]

_LEVEL = 1
"""The streams have no repetitions worth a search: this level's entropy coder comes within 2% of their entropy."""
_MAX_WINDOW_BYTES = 1 << 27
"""Bounds what a hostile frame can make the decoder allocate besides its output."""

_local = threading.local()


def compress(data: bytes | memoryview) -> bytes:
    """One zstd frame that states its content size."""
    compressor = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
    frame: bytes = compressor.compress(data)
    return frame


def decompress(frame: memoryview, size: int) -> bytes:
    """Undo `compress`.

    Args:
        frame: One frame, nothing behind it.
        size: Bytes that it must contain; nothing larger is allocated.

    Raises:
        CodecError: if it is anything else.
    """
    try:
        if zstandard.frame_content_size(frame) != size:
            raise CodecError(f"a zstd frame does not contain the {size} bytes announced; pull the version again")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        data: bytes = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"a zstd frame is damaged ({error}); pull the version again") from error
    if len(data) != size:
        raise CodecError(f"a zstd frame contains {len(data)} bytes, announced were {size}; pull the version again")
    return data


def pack(stream: bytes | memoryview) -> bytes | memoryview:
    """The stream as one zstd frame, or unchanged where the frame would not be smaller."""
    frame = compress(stream) if len(stream) else b""
    return frame if len(frame) < len(stream) else stream


def unpack(stored: memoryview, size: int) -> bytes | memoryview:
    """Undo `pack`: a stream of `size` bytes.

    Raises:
        CodecError: if the stored bytes are not such a stream.
    """
    if len(stored) == size:
        return stored
    return decompress(stored, size)
