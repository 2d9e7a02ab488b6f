"""How the difference of two versions of a tensor is written, exactly; the format is in docs/delta-format.md."""

from weightsync.codec.choose import apply, encode
from weightsync.codec.encoding import CodecError, Encoded, Encoding

__all__ = ["CodecError", "Encoded", "Encoding", "apply", "encode"]
