"""Which tokens stay in the numerator of M2PO's loss (arXiv 2510.01161)."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from trainer_svc.engine.shapes import MaskPerToken, PerToken
from trainer_svc.objectives.terms import log_difference
from trainer_svc.parallel.ranks import ALONE, Ranks

__all__ = ["keep_small_moments"]


def keep_small_moments(
    behaviour: Rows[PerToken], proximal: Rows[PerToken], *, tau: float, ranks: Ranks = ALONE
) -> list[MaskPerToken]:
    """Drop the tokens with the largest (log b - log o)^2 until the mean of the rest is below tau, over the global batch.

    Exact over all ranks: every rank sees the values of all of them. Tokens of exactly the first dropped value go too, so
    that neither order nor ranks decide between equals.

    Args:
        behaviour: log b of the loss tokens of each of this rank's sequences.
        proximal: log o of the same tokens.
        tau: Nats squared.
        ranks: All ranks that have a share of the batch; they call this together.

    Returns:
        For each sequence whether each token is kept.
    """
    moments = [log_difference(b.double(), o.double()).square() for b, o in zip(behaviour, proximal, strict=True)]
    own = torch.cat(moments) if moments else torch.zeros(0, dtype=torch.float64)
    ordered = ranks.gather(own).sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, dtype=torch.float64)
    kept = int((means < tau).sum())
    if kept == len(ordered):
        return [torch.ones_like(each, dtype=torch.bool) for each in moments]
    first_dropped = ordered[kept]
    return [each < first_dropped for each in moments]
