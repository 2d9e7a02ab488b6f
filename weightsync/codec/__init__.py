"""How the difference of two versions of a tensor is written, exactly; the format is in docs/delta-format.md."""

from weightsync.codec.encoding import CodecError, Encoded, Encoding
from weightsync.codec.slices import apply, encode

__all__ = ["CodecError", "Encoded", "Encoding", "apply", "encode"]
