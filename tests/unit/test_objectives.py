"""Objectives against closed forms computed with plain floats: value and gradient of each token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny_policy import row

from trainer_svc.config import ObjectiveConfig, TrainerConfig
from trainer_svc.objectives.aggregation import sequence_weights
from trainer_svc.objectives.diagnostics import finish
from trainer_svc.objectives.kl import kl_estimate
from trainer_svc.objectives.objective import Objective
from trainer_svc.objectives.presets import PRESETS
from trainer_svc.objectives.terms import GlobalCounts, TokenTerms, log_difference

# Ratios 0.5, 0.9, 1.1, 1.5, 6.0 at both signs of the advantage: inside, below and above every default bound.
RATIOS = [0.5, 0.9, 1.1, 1.5, 6.0] * 2
ADVANTAGES = [2.0] * 5 + [-0.5] * 5
BEHAVIOUR = [-1.0, -0.3, -2.0, -3.0, -4.0, -1.5, -0.2, -2.5, -3.5, -5.0]


def terms(
    ratios=RATIOS, advantages=ADVANTAGES, behaviour=BEHAVIOUR, *, weights=None, reference=None, entropy=None
) -> TokenTerms:
    base = torch.tensor(behaviour, dtype=torch.float64)
    current = (base + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    count = len(ratios)
    return TokenTerms(
        current=current,
        behaviour=base,
        proximal=base,
        reference=None if reference is None else torch.tensor(reference, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        owners=torch.zeros(count, dtype=torch.int64),
        weights=torch.tensor(weights or [1.0] * count, dtype=torch.float64),
        entropy=entropy,
    )


def loss_and_gradient(config: ObjectiveConfig, inputs: TokenTerms) -> tuple[float, list[float], dict[str, float]]:
    loss, sums = Objective.of(config)(inputs)
    loss.backward()
    return float(loss.detach()), inputs.current.grad.tolist(), {name: float(value) for name, value in sums.items()}


def test_aipo_is_the_truncated_weight_times_the_log_probability():
    config = ObjectiveConfig(preset="aipo")
    loss, gradient, sums = loss_and_gradient(config, terms())
    weights = [min(q, 4.0) for q in RATIOS]
    logs = [b + math.log(q) for b, q in zip(BEHAVIOUR, RATIOS, strict=True)]
    assert loss == pytest.approx(sum(-w * a * t for w, a, t in zip(weights, ADVANTAGES, logs, strict=True)), rel=1e-12)
    assert gradient == pytest.approx([-w * a for w, a in zip(weights, ADVANTAGES, strict=True)], rel=1e-12)
    assert sums["clipped_high"] == 2


def test_aipo_takes_another_bound():
    _, gradient, _ = loss_and_gradient(ObjectiveConfig(preset="aipo", delta=1.2), terms())
    assert gradient == pytest.approx([-min(q, 1.2) * a for q, a in zip(RATIOS, ADVANTAGES, strict=True)], rel=1e-12)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.6, 9.0)])
def test_grpo_is_the_pessimistic_clipped_ratio(low, high):
    config = ObjectiveConfig(preset="grpo", eps_low=low, eps_high=high)
    loss, gradient, sums = loss_and_gradient(config, terms())
    values, slopes, above, below = [], [], 0, 0
    for r, a in zip(RATIOS, ADVANTAGES, strict=True):
        clipped = min(max(r, 1 - low), 1 + high)
        values.append(-min(r * a, clipped * a))
        is_clipped = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
        slopes.append(0.0 if is_clipped else -r * a)  # d r / d log t = r
        above += a > 0 and r > 1 + high
        below += a < 0 and r < 1 - low
    assert loss == pytest.approx(sum(values), rel=1e-12)
    assert gradient == pytest.approx(slopes, rel=1e-12)
    assert (sums["clipped_high"], sums["clipped_low"]) == (above, below)


def test_sft_is_the_negative_log_likelihood():
    loss, gradient, _ = loss_and_gradient(ObjectiveConfig(preset="sft"), terms())
    assert loss == pytest.approx(-sum(b + math.log(q) for b, q in zip(BEHAVIOUR, RATIOS, strict=True)))
    assert gradient == [-1.0] * 10


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", lambda x: x, lambda x: 1.0),
        ("k2", lambda x: x * x / 2, lambda x: x),
        ("k3", lambda x: math.exp(-x) - 1 + x, lambda x: 1 - math.exp(-x)),
    ],
)
def test_the_kl_term_adds_its_estimate_and_its_gradient(kind, value, slope):
    gaps = [-0.7, 0.0, 0.4]
    behaviour = [-1.0, -2.0, -3.0]
    reference = [b - x for b, x in zip(behaviour, gaps, strict=True)]
    config = ObjectiveConfig(preset="grpo", kl_coef=0.04, kl_kind=kind)
    loss, gradient, sums = loss_and_gradient(config, terms([1.0] * 3, [1.0, -1.0, 0.0], behaviour, reference=reference))
    assert loss == pytest.approx(-1.0 + 1.0 + 0.04 * sum(map(value, gaps)), rel=1e-10, abs=1e-12)
    assert gradient == pytest.approx(
        [s + 0.04 * slope(x) for s, x in zip((-1.0, 1.0, 0.0), gaps, strict=True)], rel=1e-10, abs=1e-12
    )
    assert sums["kl"] == pytest.approx(sum(map(value, gaps)), rel=1e-10, abs=1e-12)


def test_kl_estimates_stay_within_ten_nats():
    far = kl_estimate("k3", torch.tensor([-60.0]), torch.tensor([-1.0]))
    assert far.tolist() == [10.0]
    assert kl_estimate("k1", torch.tensor([-60.0]), torch.tensor([-1.0])).tolist() == [-10.0]


def test_a_kl_coefficient_without_a_reference_is_an_error():
    with pytest.raises(ValueError, match="reference log-probabilities"):
        Objective.of(ObjectiveConfig(preset="grpo", kl_coef=0.1))(terms())


def test_the_entropy_bonus_lowers_the_loss():
    entropy = torch.tensor([1.5, 0.5], dtype=torch.float64, requires_grad=True)
    inputs = terms([1.0, 1.0], [0.0, 0.0], [-1.0, -1.0], weights=[0.5, 0.5], entropy=entropy)
    loss, _ = Objective.of(ObjectiveConfig(preset="aipo", entropy_coef=0.1))(inputs)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.1 * 1.0)
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


RATIO_PRESETS = sorted(name for name, preset in PRESETS.items() if preset.needs_behaviour)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(RATIO_PRESETS), st.lists(st.floats(-15, -1e-3), min_size=1, max_size=20))
def test_on_policy_with_advantage_one_the_gradient_is_that_of_the_log_likelihood(preset, behaviour):
    count = len(behaviour)
    _, gradient, _ = loss_and_gradient(ObjectiveConfig(preset=preset), terms([1.0] * count, [1.0] * count, behaviour))
    assert gradient == pytest.approx([-1.0] * count, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.floats(4.5, 1000.0), st.floats(0.1, 3.0))
def test_a_truncated_token_of_aipo_keeps_its_gradient_and_a_clipped_one_of_grpo_loses_it(ratio, advantage):
    _, kept, _ = loss_and_gradient(ObjectiveConfig(preset="aipo"), terms([ratio], [advantage], [-9.0]))
    _, lost, _ = loss_and_gradient(ObjectiveConfig(preset="grpo"), terms([ratio], [advantage], [-9.0]))
    assert kept == pytest.approx([-4.0 * advantage])
    assert lost == [0.0]


def test_log_differences_are_clamped_to_twenty():
    assert log_difference(torch.tensor([0.0, -90.0]), torch.tensor([-50.0, 0.0])).tolist() == [20.0, -20.0]
    loss, _, _ = loss_and_gradient(ObjectiveConfig(preset="grpo"), terms([1.0], [-1.0], [-1.0]))
    assert math.isfinite(loss)
    inputs = terms([math.exp(300.0)], [-1.0], [-400.0])
    assert loss_and_gradient(ObjectiveConfig(preset="grpo"), inputs)[0] == pytest.approx(math.exp(20.0))


def test_aggregations_weigh_tokens_by_global_counts():
    rows = [
        row([1], [2] * 3, group="a", name="0"),
        row([1], [2], group="a", name="1"),
        row([1], [2] * 4, group="b", name="2"),
    ]
    counts = GlobalCounts.of(rows)
    assert (counts.tokens, counts.sequences, counts.group_tokens) == (8, 3, {"a": 4, "b": 4})
    assert sequence_weights("token", counts, rows).tolist() == pytest.approx([1 / 8] * 3)
    assert sequence_weights("sequence", counts, rows).tolist() == pytest.approx([1 / 9, 1 / 3, 1 / 12])
    assert sequence_weights("prompt", counts, rows).tolist() == pytest.approx([1 / 8] * 3)
    assert sequence_weights("constant", counts, rows, 10).tolist() == pytest.approx([1 / 30] * 3)
    with pytest.raises(ValueError, match="max_tokens"):
        sequence_weights("constant", counts, rows)


def test_counts_of_two_ranks_add_up_to_those_of_the_whole_batch():
    rows = [
        row([1], [2] * size, group=group, name=str(size)) for size, group in ((3, "a"), (1, "b"), (2, "a"), (5, ""))
    ]
    silent = row([1, 2], [3], group="c", name="silent")
    silent.loss_mask[:] = False
    assert GlobalCounts.of(rows[:2]) + GlobalCounts.of([*rows[2:], silent]) == GlobalCounts.of(rows)


def test_the_policy_gap_is_measured_against_the_behaviour_policy():
    _, _, sums = loss_and_gradient(ObjectiveConfig(), terms([2.0, 0.5], [1.0, 1.0], [-3.0, -1.0]))
    report = finish(sums)
    assert report["mismatch_kl"] == pytest.approx(((2 - math.log(2) - 1) + (0.5 + math.log(2) - 1)) / 2)
    assert report["max_abs_log_difference"] == pytest.approx(math.log(2))
    assert report["effective_sample_size"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert report["chi_square"] == pytest.approx(4.25 / 2 - 1)
    assert report["clip_fraction_high"] == 0.0


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"preset": "gpro"}, "no objective 'gpro'; choose one of"),
        ({"preset": "grpo", "delta": 3.0}, "grpo has no delta; it takes eps_low, eps_high"),
        ({"preset": "aipo", "aggregation": "constant"}, "set it to the longest completion"),
        ({"preset": "aipo", "max_tokens": 5}, "aggregation constant only"),
    ],
)
def test_parameters_that_a_preset_would_ignore_are_refused(settings_, message):
    with pytest.raises(ValidationError, match=message):
        ObjectiveConfig(**settings_)


def test_the_trainer_refuses_the_objective_of_demonstrations():
    with pytest.raises(ValidationError, match="sluice sft"):
        TrainerConfig(objective=ObjectiveConfig(preset="sft"))
