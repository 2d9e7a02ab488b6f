"""How old a token is when it is trained. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sluice.versions import Version, VersionSpan, span_lengths
from trainer_svc.checkpoint.lineage import Lineage

__all__ = ["token_staleness"]


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
    ages = np.array([lineage.staleness(span.version, now) for span in spans], dtype=np.int64)
    return np.repeat(ages, span_lengths([span.start for span in spans], trained_tokens))
