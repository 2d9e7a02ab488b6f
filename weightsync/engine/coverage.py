"""Which parts of a staged file are there: part of the file's own header, so that it cannot be lost on the way.

A file that holds only what one process reads is as long as the whole one and has holes, which read as zeros. Weights with
zeros in them are silent garbage: whoever reads such a file compares first what is there with what it is going to read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from weightsync.engine.selection import Ranges, Selection, missing, normal

__all__ = ["METADATA_KEY", "Coverage", "CoverageError"]

METADATA_KEY = "sluice_coverage"
"""Entry of the safetensors header's metadata; a file without it is whole."""


class CoverageError(Exception):
    """The file does not hold what is wanted of it."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a file holds.

    Attributes:
        partial: Ranges of elements of each tensor that is not whole, as in `weightsync.engine.selection`.
    """

    partial: Mapping[str, Ranges] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return not self.partial

    def check(self, reads: Selection) -> None:
        """Compare with what a process is going to read.

        Raises:
            CoverageError: naming the first elements that are not there.
        """
        for name, have in self.partial.items():
            if name not in reads:
                raise CoverageError(f"only parts of {name} are there, and what is read of it is not known")
            hole = missing(have, reads[name])
            if hole is not None:
                raise CoverageError(f"elements {hole[0]} to {hole[1]} of {name} are read and are not there")

    def metadata(self) -> dict[str, str]:
        """The entry for the file's header; empty if the file is whole."""
        if self.whole:
            return {}
        table = {name: [list(piece) for piece in ranges] for name, ranges in self.partial.items()}
        return {METADATA_KEY: json.dumps(table, separators=(",", ":"))}

    @classmethod
    def parse(cls, metadata: Mapping[str, str] | None) -> Coverage:
        """Read a header's metadata.

        Raises:
            CoverageError: if the entry is not of the right form.
        """
        text = (metadata or {}).get(METADATA_KEY)
        if text is None:
            return cls()
        try:
            table = json.loads(text)
            return cls({name: normal((int(begin), int(end)) for begin, end in rows) for name, rows in table.items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise CoverageError(f"the file does not say what it holds: {error}; stage it again") from error
