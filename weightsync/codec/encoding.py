"""The ways in which a slice's bytes travel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["CodecError", "Encoded", "Encoding"]


class CodecError(ValueError):
    """The data are no stream of the stated encoding, or not one for this target."""


class Encoding(IntEnum):
    """Encoding of a slice; the numbers are those of `sluice.v1.TensorEncoding`."""

    DENSE = 1
    """The bytes as safetensors lays them out."""
    DENSE_ZSTD = 2
    """DENSE as one zstd frame."""
    DELTA = 3
    """What differs from the base; see weightsync.codec.slices."""
    UNCHANGED = 4
    """The bytes of the base."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One slice as it travels.

    Attributes:
        encoding: How.
        data: What; empty for UNCHANGED, a view of the caller's bytes for DENSE.
        changed: Elements whose bit pattern differs from the base's; all of them where there is no base.
    """

    encoding: Encoding
    data: bytes | memoryview
    changed: int
