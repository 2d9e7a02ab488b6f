"""What the facts of a journal have in common: where a payload lies, and the error of a fact that cannot be true."""

from __future__ import annotations

from typing import NamedTuple

from sluice.v1 import journal_pb2 as pb


class LedgerError(Exception):
    """A fact does not follow from those before it, or the ledger cannot go back as far as asked."""


class Place(NamedTuple):
    """Where a payload lies: number of the segment, offset of its record in bytes, xxh3-128 (16 bytes; empty: not known)."""

    segment: int
    offset: int
    digest: bytes

    @classmethod
    def from_proto(cls, message: pb.PayloadPlace) -> Place:
        """Read the form that facts have."""
        return cls(message.segment, message.offset, message.digest)

    def to_proto(self) -> pb.PayloadPlace:
        """Write the form that facts have."""
        return pb.PayloadPlace(segment=self.segment, offset=self.offset, digest=self.digest)
