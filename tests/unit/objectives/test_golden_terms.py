"""Aggregations, KL and entropy terms, and what is reported, against closed forms."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from by_hand import BATCH, FORMULAS, as_case, taken
from golden import expect, result_of

from sluice.config import ConfigError
from trainer_svc.objectives.presets import PRESETS


@pytest.mark.parametrize("preset", FORMULAS)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
def test_golden_aggregation(preset, aggregation):
    params = {"aggregation": aggregation}
    if aggregation == "constant":
        params["max_tokens"] = 10
    expect(preset, FORMULAS[preset], params, aggregation=aggregation)


KL = {"k2": (lambda x: x * x / 2, lambda x: x), "k3": (lambda x: math.exp(-x) - 1 + x, lambda x: 1 - math.exp(-x))}


@pytest.mark.parametrize("preset", ["grpo", "aipo", "sft"])
@pytest.mark.parametrize("kind", KL)
def test_golden_kl_in_the_loss(preset, kind):
    value_of, slope_of = KL[kind]

    def formula(token, row):
        value, slope = FORMULAS[preset](token, row)
        x = token.t - token.ref
        return value + 0.04 * value_of(x), slope + 0.04 * slope_of(x)

    params = {"kl_coef": 0.04, "kl_kind": kind, "aggregation": "token"}
    result = expect(preset, formula, params)
    gaps = [value_of(token.t - token.ref) for row in BATCH for token in taken(row)]
    assert result["metrics"]["kl"] == pytest.approx(sum(gaps) / 13)


def k3(x: float) -> tuple[float, float]:
    """Value and slope of the k3 loss, linear below -3."""
    if x >= -3:
        return math.exp(-x) - 1 + x, 1 - math.exp(-x)
    return math.exp(3) - 4 - (math.exp(3) - 1) * (x + 3), 1 - math.exp(3)


@pytest.mark.parametrize("x", [-30.0, -10.0, -3.5, -3.0, -2.9, -1.0, 0.0, 4.0, 30.0])
@pytest.mark.parametrize(("kind", "formula"), [("k2", lambda x: (x * x / 2, x)), ("k3", k3)])
def test_golden_kl_in_the_loss_keeps_its_gradient_however_far_the_policy_is(kind, formula, x):
    far = [[replace(token, ref=token.t - x, a=0.0) for token in row] for row in BATCH]
    result = expect("dapo", lambda *_: formula(x), {"kl_coef": 1.0, "kl_kind": kind}, batch=far)
    assert result["metrics"]["kl"] == pytest.approx(formula(x)[0], abs=1e-14)


@pytest.mark.slow
def test_the_gradient_of_the_k3_loss_is_bounded_and_does_not_jump():
    """It never exceeds 19.1 per nat, and never vanishes where the policy has fallen below the reference."""
    steps = sorted([-30 + 0.2 * place for place in range(151)] + [-3 + 0.01 * place for place in range(-20, 21)])
    slopes = []
    for x in steps:
        case = as_case("sft", {"kl_coef": 1.0, "kl_kind": "k3"}, batch=[[replace(BATCH[0][1], ref=BATCH[0][1].t - x)]])
        slopes.append(result_of(case)["grad"][0][0] + 1.0)  # sft's own gradient is -1
    assert slopes == pytest.approx([k3(x)[1] for x in steps], abs=1e-12)
    assert min(slopes) == pytest.approx(1 - math.exp(3))
    assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(slopes))


@pytest.mark.parametrize(
    ("kind", "x", "paid"),
    [("k1", -30.0, -10.0), ("k1", 4.0, 4.0), ("k2", -30.0, 10.0), ("k3", -30.0, 10.0), ("k3", -2.0, math.exp(2) - 3)],
)
def test_golden_kl_in_the_reward_is_clamped_to_ten_nats(kind, x, paid):
    sequence = {"logp": [-1.0], "behaviour_logp": [-1.0], "ref_logp": [-1.0 - x], "reward": 2.0, "values": [0.0]}
    params = {"kl_coef": 0.5, "kl_kind": kind, "kl_where": "reward"}
    result = result_of({"preset": "ppo", "params": params, "sequences": [sequence]})
    assert result["advantages"] == [pytest.approx([2.0 - 0.5 * paid])]


def test_masks_and_corrections_concern_the_surrogate_and_not_the_kl_term():
    def formula(token, row):
        x = token.t - token.ref
        return 0.1 * (math.exp(-x) - 1 + x), 0.1 * (1 - math.exp(-x))

    params = {"kl_coef": 0.1, "correction": {"kind": "token_mask", "low": 1e8, "high": 1e9}}
    expect("dapo", formula, params, proximal=True)


MASKED = [name for name, preset in PRESETS.items() if "kl_tau" in preset.other_parameters]


def test_the_presets_that_drop_tokens_may_pull_towards_the_policy_that_sampled_and_do_not_by_default():
    assert MASKED == ["dppo", "ipo_mask", "icepop"]
    assert {PRESETS[name].other_parameters["kl_tau"] for name in MASKED} == {0.0}


def pulled(preset, strength, drops=lambda token, row: False):
    """The surrogate, where nothing drops the token, and the pull on every token that has an advantage."""

    def formula(token, row):
        value, slope = (0.0, 0.0) if drops(token, row) else FORMULAS[preset](token, row)
        gap = token.t - token.b if token.a else 0.0
        return value + strength * gap**2, slope + 2 * strength * gap

    return formula


@pytest.mark.parametrize("preset", MASKED)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt"])
def test_golden_pull_towards_the_policy_that_sampled(preset, aggregation):
    """kl_tau (log t/b)^2 on every token with an advantage, also on those that the preset's mask drops."""
    params = {"kl_tau": 0.3, "aggregation": aggregation}
    moved = [[replace(token, t=-0.1 if token.a > 0 else -4.0) for token in row] for row in BATCH]
    metrics = expect(preset, pulled(preset, 0.3), params, aggregation=aggregation, batch=moved)["metrics"]
    assert 0 < metrics["mask_fraction_low"] + metrics["mask_fraction_high"] < 1
    silent = [[replace(token, a=0.0) if place % 2 else token for place, token in enumerate(row)] for row in BATCH]
    expect(preset, pulled(preset, 0.3), params, aggregation=aggregation, batch=silent)


def test_the_pull_is_not_dropped_with_a_sequence_and_keeps_its_gradient_however_far_the_policy_is():
    far = [[replace(token, t=token.b - 30.0, a=-1.0) for token in row] for row in BATCH]
    params = {"kl_tau": 0.3, "correction": {"off_policy_sequence_mask": 0.5}}
    result = expect("ipo_mask", pulled("ipo_mask", 0.3, drops=lambda token, row: True), params, batch=far)
    assert result["metrics"]["off_policy_mask_fraction"] == 1.0


@pytest.mark.parametrize("preset", MASKED)
def test_a_negative_pull_and_one_of_another_preset_are_refused(preset):
    with pytest.raises(ConfigError, match="kl_tau"):
        result_of(as_case(preset, {"kl_tau": -0.1}))
    with pytest.raises(ConfigError, match="grpo has no kl_tau"):
        result_of(as_case("grpo", {"kl_tau": 0.1}))


def test_golden_entropy_bonus():
    case = as_case("dapo", {"entropy_coef": 0.3})
    plain = result_of(as_case("dapo"))["loss"]
    entropies = [[0.5 + 0.1 * place for place in range(len(row))] for row in BATCH]
    for sequence, values in zip(case["sequences"], entropies, strict=True):
        sequence["entropy"] = values
    result = result_of(case)
    mean = (
        sum(h for row, hs in zip(BATCH, entropies, strict=True) for t, h in zip(row, hs, strict=True) if t.taken) / 13
    )
    assert result["loss"] == pytest.approx(plain - 0.3 * mean, rel=1e-12)
    assert result["metrics"]["entropy"] == pytest.approx(mean)


def test_the_gap_to_the_engine_is_reported():
    metrics = result_of(as_case("aipo"))["metrics"]
    gaps = [token.t - token.b for row in BATCH for token in taken(row)]
    weights = [math.exp(gap) for gap in gaps]
    squares = sum(weight**2 for weight in weights)
    assert metrics["mismatch_kl"] == pytest.approx(sum(w - g - 1 for w, g in zip(weights, gaps, strict=True)) / 13)
    assert metrics["max_abs_log_difference"] == pytest.approx(max(map(abs, gaps)))
    assert metrics["effective_sample_size"] == pytest.approx(sum(weights) ** 2 / (13 * squares))
    assert metrics["chi_square"] == pytest.approx(squares / 13 - 1)


def test_the_spread_of_the_correction_is_reported_before_truncation():
    metrics = result_of(as_case("dapo", {"correction": {"kind": "token_tis", "cap": 1.0}}, proximal=True))["metrics"]
    rhos = [token.rho for row in BATCH for token in taken(row)]
    squares = sum(rho**2 for rho in rhos)
    assert metrics["correction_effective_sample_size"] == pytest.approx(sum(rhos) ** 2 / (13 * squares))
    assert metrics["correction_chi_square"] == pytest.approx(squares / 13 - 1)
    assert metrics["correction_truncate_fraction"] == pytest.approx(sum(rho > 1.0 for rho in rhos) / 13)


SIDES = {
    "aipo": {"truncate_fraction": lambda k: k.q > 4},
    "dapo": {
        "clip_fraction_high": lambda k: k.a > 0 and k.q > 1.28,
        "clip_fraction_low": lambda k: k.a < 0 and k.q < 0.8,
    },
    "cispo": {"clip_fraction_high": lambda k: k.q > 5, "clip_fraction_low": lambda k: k.q < 0},
    "icepop": {"mask_fraction_high": lambda k: k.q > 5, "mask_fraction_low": lambda k: k.q < 0.5},
    "ipo_mask": {
        "mask_fraction_high": lambda k: math.exp(k.t) - math.exp(k.b) > 0.1,
        "mask_fraction_low": lambda k: math.exp(k.b) - math.exp(k.t) > 0.1,
    },
}


@pytest.mark.parametrize("preset", SIDES)
def test_what_is_clipped_masked_or_truncated_is_counted_by_side(preset):
    metrics = result_of(as_case(preset))["metrics"]
    for name, happens in SIDES[preset].items():
        assert metrics[name] == pytest.approx(sum(happens(token) for row in BATCH for token in taken(row)) / 13)


def test_log_differences_are_clamped_to_twenty():
    case = {
        "preset": "dapo",
        "sequences": [{"logp": [-100.0, -1.0], "behaviour_logp": [-400.0, -1.0], "advantage": [-1.0, 0.0]}],
    }
    assert result_of(case)["loss"] == pytest.approx(math.exp(20.0) / 2)


def test_a_token_without_a_behaviour_log_probability_leaves_loss_and_divisor_and_is_counted():
    case = as_case("dapo")
    case["sequences"][0]["behaviour_logp"][2] = None
    holed = result_of(case)
    case["sequences"][0]["behaviour_logp"][2] = -0.3
    case["sequences"][0]["mask"][2] = 0
    narrow = result_of(case)
    assert (holed["loss"], holed["grad"]) == (narrow["loss"], narrow["grad"])
    assert holed["metrics"]["dropped_tokens/behaviour_not_finite"] == 1
    assert holed["metrics"]["divisor"] == 12
