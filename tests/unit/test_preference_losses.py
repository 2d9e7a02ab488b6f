"""Losses of pairs against values worked out by hand, in float64: value and gradient."""

from __future__ import annotations

import math

import pytest
import torch

from trainer_svc.offline.losses import bradley_terry, dpo, ipo


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def evaluated(loss, chosen: list[float], rejected: list[float], **parameters: float):
    """The losses, and the gradient of their sum by either argument."""
    better, worse = (torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in (chosen, rejected))
    losses = loss(better, worse, **parameters)
    losses.sum().backward()
    return losses.tolist(), better.grad.tolist(), worse.grad.tolist()


def test_dpo_is_the_log_loss_of_the_scaled_difference():
    losses, better, worse = evaluated(dpo, [1.5, -2.0, 0.0], [0.5, 3.0, 0.0], beta=0.1)
    assert losses == pytest.approx([math.log(1 + math.exp(-0.1)), math.log(1 + math.exp(0.5)), math.log(2)], rel=1e-12)
    expected = [-0.1 * sigmoid(-0.1), -0.1 * sigmoid(0.5), -0.05]
    assert better == pytest.approx(expected, rel=1e-12)
    assert worse == pytest.approx([-each for each in expected], rel=1e-12)


def test_smoothed_labels_stop_the_margin_where_the_odds_are_right():
    (loss,), (gradient,), _ = evaluated(dpo, [4.0], [1.0], beta=0.5, label_smoothing=0.1)
    assert loss == pytest.approx(-0.9 * math.log(sigmoid(1.5)) - 0.1 * math.log(sigmoid(-1.5)), rel=1e-12)
    assert gradient == pytest.approx(0.5 * (-0.9 * sigmoid(-1.5) + 0.1 * sigmoid(1.5)), rel=1e-12)
    _, (at_odds,), _ = evaluated(dpo, [math.log(9.0)], [0.0], beta=1.0, label_smoothing=0.1)
    assert at_odds == pytest.approx(0.0, abs=1e-15)


def test_ipo_aims_at_a_margin_and_not_beyond():
    losses, better, worse = evaluated(ipo, [0.3, 5.0], [0.1, 0.0], beta=0.25)
    assert losses == pytest.approx([1.8**2, 3.0**2], rel=1e-12)
    assert better == pytest.approx([-3.6, 6.0], rel=1e-12)
    assert worse == pytest.approx([3.6, -6.0], rel=1e-12)


def test_bradley_terry_reads_the_difference_and_centering_the_sum():
    losses, better, worse = evaluated(bradley_terry, [2.0, 0.0], [0.5, 1.0])
    assert losses == pytest.approx([math.log(1 + math.exp(-1.5)), math.log(1 + math.e)], rel=1e-12)
    assert better == pytest.approx([-sigmoid(-1.5), -sigmoid(1.0)], rel=1e-12)
    assert worse == pytest.approx([sigmoid(-1.5), sigmoid(1.0)], rel=1e-12)
    (centred,), (up,), (down,) = evaluated(bradley_terry, [2.0], [0.5], centering=0.1)
    assert centred == pytest.approx(losses[0] + 0.1 * 2.5**2, rel=1e-12)
    assert (up, down) == pytest.approx((0.5 - sigmoid(-1.5), 0.5 + sigmoid(-1.5)), rel=1e-12)


@pytest.mark.parametrize(("loss", "parameters"), [(dpo, {"beta": 0.1, "label_smoothing": 0.2}), (bradley_terry, {})])
def test_log_losses_stay_finite_however_wrong_the_pair_is(loss, parameters):
    losses, better, worse = evaluated(loss, [-1e6, 1e6], [1e6, -1e6], **parameters)
    assert all(map(math.isfinite, [*losses, *better, *worse]))
