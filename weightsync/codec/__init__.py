"""How the difference of two versions of a tensor is written, exactly; the format is in docs/delta-format.md."""

from weightsync.codec.slices import (
    Encoded,
    Encoding,
    apply,
    apply_slice,
    check_slice,
    encode,
    slice_bytes,
    slice_region,
)
from weightsync.codec.streams import CodecError

__all__ = [
    "CodecError",
    "Encoded",
    "Encoding",
    "apply",
    "apply_slice",
    "check_slice",
    "encode",
    "slice_bytes",
    "slice_region",
]
