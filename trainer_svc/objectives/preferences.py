"""Losses of pairs, chosen against rejected: pure functions of one number per sequence, each returning one loss per pair.

Reductions and metrics are the caller's. `gain` is what a policy adds to its reference on a sequence, log t - log ref summed
over the sequence's loss tokens.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from trainer_svc.batch.shapes import PerPair

__all__ = ["bradley_terry", "dpo", "ipo"]


def dpo(chosen_gain: PerPair, rejected_gain: PerPair, *, beta: float, label_smoothing: float = 0.0) -> PerPair:
    """-log sigmoid(beta (chosen - rejected)) (DPO, arXiv 2305.18290).

    Args:
        chosen_gain: log t - log ref of the chosen answers, summed over their tokens, in nats.
        rejected_gain: As `chosen_gain`, of the rejected ones.
        beta: Reward per nat of gain; larger ones stay nearer to the reference.
        label_smoothing: Share of pairs whose labels are taken to be swapped (conservative DPO); below 0.5.
    """
    margin = beta * (chosen_gain - rejected_gain)
    return -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(chosen_gain: PerPair, rejected_gain: PerPair, *, beta: float) -> PerPair:
    """(chosen - rejected - 1 / (2 beta))^2 of gains per token (IPO, arXiv 2310.12036).

    Args:
        chosen_gain: log t - log ref of the chosen answers, the mean over their tokens, in nats.
        rejected_gain: As `chosen_gain`, of the rejected ones.
        beta: Strength of the regularisation towards the reference; the margin aimed at is 1 / (2 beta) nats per token.
    """
    return (chosen_gain - rejected_gain - 1.0 / (2.0 * beta)).square()


def bradley_terry(chosen_score: PerPair, rejected_score: PerPair, *, centering: float = 0.0) -> PerPair:
    """-log sigmoid(chosen - rejected) + centering (chosen + rejected)^2.

    The first term alone fixes scores up to a constant per prompt; the second draws their mean to 0 (arXiv 2312.09244).

    Args:
        chosen_score: Scores of the chosen answers.
        rejected_score: Scores of the rejected ones.
        centering: Weight of the second term.
    """
    loss: torch.Tensor = -logsigmoid(chosen_score - rejected_score)
    return loss + centering * (chosen_score + rejected_score).square() if centering else loss
