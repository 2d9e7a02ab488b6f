"""Every correction of the decoupled form against its closed form, on PPO's clip; masks leave the denominator as it was."""

from __future__ import annotations

import math

import pytest
from by_hand import BATCH, as_case, clip_form, taken
from golden import expect, result_of


def log_rhos(row):
    return [token.o - token.b for token in taken(row)]


def mean(values):
    return sum(values) / len(values)


def product(row) -> float:
    return math.exp(sum(log_rhos(row)))


def inside(value: float, low: float, high: float) -> float:
    return 1.0 if low <= value <= high else 0.0


def k3(row) -> float:
    return mean([math.exp(x) - x - 1 for x in log_rhos(row)])


WEIGHTS = {
    "none": ({}, lambda token, row: 1.0),
    "token_tis": ({}, lambda token, row: min(token.rho, 2.0)),
    "token_tis, cap 1.1": ({"cap": 1.1}, lambda token, row: min(token.rho, 1.1)),
    "sequence_tis": ({}, lambda token, row: min(product(row), 2.0)),
    "sequence_tis, cap 0.95": ({"cap": 0.95}, lambda token, row: min(product(row), 0.95)),
    "sequence_mask": ({}, lambda token, row: inside(product(row), 0.5, 2.0)),
    "sequence_mask, narrow": ({"low": 0.999, "high": 1.001}, lambda token, row: inside(product(row), 0.999, 1.001)),
    "geometric_mask": ({}, lambda token, row: inside(math.exp(mean(log_rhos(row))), 0.99, 1.01)),
    "geometric_mask, wide": (
        {"low": 0.5, "high": 1.1},
        lambda token, row: inside(math.exp(mean(log_rhos(row))), 0.5, 1.1),
    ),
    "token_mask": ({}, lambda token, row: token.rho if 0.5 <= token.rho <= 5.0 else 0.0),
    "token_mask, narrow": (
        {"low": 0.85, "high": 1.15},
        lambda token, row: token.rho if 0.85 <= token.rho <= 1.15 else 0.0,
    ),
    "k3_mask": ({}, lambda token, row: 1.0 if k3(row) <= 0.01 else 0.0),
    "k3_mask, wide": ({"threshold": 0.2}, lambda token, row: 1.0 if k3(row) <= 0.2 else 0.0),
}


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_golden_correction(name, aggregation):
    bounds, weight = WEIGHTS[name]

    def formula(token, row):
        value, slope = clip_form(token.r, token.a, 0.2, 0.28)
        return weight(token, row) * value, weight(token, row) * slope

    params = {"correction": {"kind": name.split(",")[0], **bounds}, "aggregation": aggregation}
    if aggregation == "constant":
        params["max_tokens"] = 10
    expect("dapo", formula, params, aggregation=aggregation, proximal=True)


def test_the_sequences_here_fall_on_both_sides_of_every_mask():
    for name, (_, weight) in WEIGHTS.items():
        if "mask" in name:
            weights = [weight(token, row) for row in BATCH for token in taken(row)]
            assert 0.0 in weights, name
            assert any(weights), name


@pytest.mark.parametrize("threshold", [0.5, 0.65])
def test_golden_veto_drops_whole_sequences(threshold):
    def formula(token, row):
        vetoed = any(each.rho < threshold for each in taken(row))
        weight = 0.0 if vetoed else min(token.rho, 2.0)
        value, slope = clip_form(token.r, token.a, 0.2, 0.28)
        return weight * value, weight * slope

    result = expect("dapo", formula, {"correction": {"kind": "token_tis", "veto": threshold}}, proximal=True)
    vetoed = [len(taken(row)) for row in BATCH if any(each.rho < threshold for each in taken(row))]
    assert 0 < sum(vetoed) < 13
    assert result["metrics"]["veto_fraction"] == pytest.approx(sum(vetoed) / 13)


@pytest.mark.parametrize("preset", ["dapo", "aipo"])
def test_golden_off_policy_sequence_mask_drops_what_was_bad_and_has_become_rare(preset):
    batch = [
        [*BATCH[1][:1]],  # mean log b - log t = 1.2, A < 0: dropped
        [*BATCH[0][1:2]],  # as far, but A > 0: kept
        [*BATCH[1][1:]],  # A < 0, near: kept
    ]

    def formula(token, row):
        drift = mean([each.b - each.t for each in taken(row)])
        if token.a < 0 and drift > 0.5:
            return 0.0, 0.0
        if preset == "aipo":
            return -min(token.q, 4.0) * token.a * token.t, -min(token.q, 4.0) * token.a
        return clip_form(token.r, token.a, 0.2, 0.28)

    result = expect(preset, formula, {"correction": {"off_policy_sequence_mask": 0.5}}, batch=batch)
    assert result["metrics"]["off_policy_mask_fraction"] == pytest.approx(1 / 6)
    assert result["grad"][0] == [0.0]


def test_a_mask_leaves_the_denominator_as_it_was():
    loose = result_of(as_case("dapo", {"correction": {"kind": "token_mask", "low": 1e-9, "high": 1e9}}, proximal=True))
    tight = result_of(as_case("dapo", {"correction": {"kind": "token_mask", "low": 0.85, "high": 1.15}}, proximal=True))
    assert tight["metrics"]["divisor"] == loose["metrics"]["divisor"] == 13
    pairs = [
        (a, b)
        for wide, narrow in zip(loose["grad"], tight["grad"], strict=True)
        for a, b in zip(wide, narrow, strict=True)
    ]
    assert any(narrow == 0.0 != wide for wide, narrow in pairs)
    assert all(narrow in (0.0, wide) for wide, narrow in pairs)


def test_the_product_over_a_long_sequence_stays_finite():
    tokens = 400
    case = {
        "preset": "dapo",
        "params": {"correction": {"kind": "sequence_tis", "cap": 1e30}},
        "sequences": [
            {
                "logp": [-1.0] * tokens,
                "proximal_logp": [-1.0] * tokens,
                "behaviour_logp": [-3.0] * tokens,
                "advantage": 1.0,
            }
        ],
    }
    assert result_of(case)["loss"] == pytest.approx(-math.exp(20.0))
