"""How old a token is when it is trained. Pure: no clock, no I/O.

A version belongs to an epoch, and each epoch began from some version of an older one, so that versions form a tree. The
staleness of a token is its distance in that tree from the weights that the batch is applied to. Within one line that is
`now - v`; for a version v that a restart at c retired it is `(v - c) + (now - c)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sluice.versions import BASE, Version
from trainer_svc.engine.batch import VersionSpan

__all__ = ["Lineage", "token_staleness"]


@dataclass(frozen=True, slots=True)
class Lineage:
    """The version from which each epoch began.

    An epoch that is not known counts as begun from the base model, which never makes a token younger than it is.

    Attributes:
        origins: Version by epoch; always of an older epoch.
    """

    origins: Mapping[int, Version] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def newest_epoch(self) -> int:
        """The newest epoch known; 0 without any."""
        return max(self.origins, default=0)

    def begin(self, epoch: int, origin: Version) -> Self:
        """The lineage with one more epoch.

        Raises:
            ValueError: if the origin is not of an older epoch.
        """
        if origin.epoch >= epoch:
            raise ValueError(f"epoch {epoch} cannot begin from version {origin}, which is not older")
        return type(self)(MappingProxyType({**self.origins, epoch: origin}))

    def merged(self, other: Self) -> Self:
        """Both lineages' epochs; those of `other` where they differ."""
        return type(self)(MappingProxyType({**self.origins, **other.origins}))

    def staleness(self, token: Version, now: Version) -> int:
        """Versions between the one that sampled a token and the one that is trained."""
        fork = self._fork(token, now)
        return (token.number - fork) + (now.number - fork)

    def is_retired(self, version: Version, now: Version) -> bool:
        """Whether `now` does not build upon this version."""
        return self._fork(version, now) < version.number

    def _fork(self, one: Version, other: Version) -> int:
        """Number of the newest version that both build upon."""
        path = self._path(one)
        for epoch, number in self._path(other).items():
            if epoch in path:
                return min(number, path[epoch])
        return 0

    def _path(self, version: Version) -> dict[int, int]:
        """For each epoch on the way back to the base model, the number at which the way leaves it; newest first."""
        path = {}
        while version.epoch > 0:
            path[version.epoch] = version.number
            version = self.origins.get(version.epoch, BASE)
        path[0] = version.number
        return path


def token_staleness(spans: Rows[VersionSpan], trained_tokens: int, lineage: Lineage, now: Version) -> NDArray[np.int64]:
    """Staleness of each trained token.

    Args:
        spans: Versions of the trained tokens; starts are counted in trained tokens, the first one is 0.
        trained_tokens: Their number.
        lineage: Where the epochs began.
        now: Version of the weights that the batch is applied to.
    """
    if trained_tokens == 0:
        return np.zeros(0, dtype=np.int64)
    starts = np.array([span.start for span in spans] + [trained_tokens])
    ages = np.array([lineage.staleness(span.version, now) for span in spans], dtype=np.int64)
    return np.repeat(ages, np.diff(starts))
