"""When comparing with the version before is worth its time. Pure."""

from __future__ import annotations

__all__ = ["DeltaTrials"]

_MOST_SKIPPED = 16
"""Versions between two trials at most: a learning rate that decays makes deltas small again."""


class DeltaTrials:
    """Leaves comparing out for a while where deltas came out larger than half a dense copy.

    After a first trial in vain one version is left out, after the next two, then four, up to sixteen. A delta that was
    worth it begins anew. Ranks that are told the same outcomes decide the same.
    """

    def __init__(self) -> None:
        self._left_out = 0
        self._pause = 1

    def due(self) -> bool:
        """Whether to compare for the next version; asked once per version."""
        if self._left_out:
            self._left_out -= 1
            return False
        return True

    def note(self, *, worth: bool) -> None:
        """Take in what a trial came to."""
        if worth:
            self._pause = 1
            return
        self._left_out = self._pause
        self._pause = min(2 * self._pause, _MOST_SKIPPED)
