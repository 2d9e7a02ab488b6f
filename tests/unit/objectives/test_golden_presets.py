"""Every preset against its closed form: value and gradient of each token, defaults and other parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from by_hand import BATCH, FORMULAS, Row, Token, as_case, clip_form, taken
from golden import expect, result_of

from trainer_svc.objectives.presets import PRESETS

AGGREGATIONS = {"grpo": "sequence", "gspo": "sequence", "sapo": "sequence", "dr_grpo": "constant"}
"""Of the presets whose default is not the mean over tokens."""


def needed(preset: str) -> dict:
    return {"max_tokens": 10} if preset == "dr_grpo" else {}


def test_the_table_here_has_every_preset():
    assert FORMULAS.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", FORMULAS)
def test_golden(preset):
    expect(preset, FORMULAS[preset], needed(preset), aggregation=AGGREGATIONS.get(preset, "token"))


DECOUPLED = [name for name, preset in PRESETS.items() if preset.anchor == "proximal" and name not in ("gspo", "m2po")]


@pytest.mark.parametrize("preset", DECOUPLED)
def test_golden_decoupled(preset):
    """The ratio is t / o, and without a correction the weight is 1."""
    expect(preset, FORMULAS[preset], needed(preset), aggregation=AGGREGATIONS.get(preset, "token"), proximal=True)


def test_golden_decoupled_gspo_brings_its_correction():
    def formula(token, row):
        value, slope = FORMULAS["gspo"](token, row)
        weight = min(token.rho, 2.0)
        return weight * value, weight * slope

    expect("gspo", formula, aggregation="sequence", proximal=True)


def kept_by_m2po(tau: float, batch: list[Row]) -> set[int]:
    """Identities of the tokens left when the largest (log b - log o)^2 are dropped until the mean is below tau, or one is left."""
    rest = sorted((token for row in batch for token in taken(row)), key=lambda token: (token.b - token.o) ** 2)
    while len(rest) > 1 and sum((token.b - token.o) ** 2 for token in rest) / len(rest) >= tau:
        rest.pop()
    return {id(token) for token in rest}


def expect_m2po(tau: float, batch: list[Row], kept: set[int]) -> None:
    def formula(token, row):
        return clip_form(token.r, token.a, 0.2, 0.2) if id(token) in kept else (0.0, 0.0)

    result = expect("m2po", formula, {"tau": tau}, proximal=True, batch=batch)
    tokens = sum(len(taken(row)) for row in batch)
    assert result["metrics"]["deselect_fraction"] == pytest.approx(1 - len(kept) / tokens)


@pytest.mark.parametrize("tau", [0.04, 0.2, 1e-9, 9.0])
def test_golden_decoupled_m2po_drops_what_moved_most_and_keeps_the_denominator(tau):
    expect_m2po(tau, BATCH, kept_by_m2po(tau, BATCH))


MOVED: list[Row] = [[replace(token, o=token.o + 0.5) for token in row] for row in BATCH]
"""No token is where the policy that sampled had it; the smallest (log b - log o)^2 is about 0.005."""


@pytest.mark.parametrize("tau", [1e-9, 1e-3])
def test_golden_decoupled_m2po_keeps_the_token_that_moved_least_where_all_moved_too_far(tau):
    kept = kept_by_m2po(tau, MOVED)
    assert len(kept) == 1
    expect_m2po(tau, MOVED, kept)


def test_golden_decoupled_m2po_keeps_all_tokens_that_moved_least_alike():
    """Neither their order nor the ranks that have them decide between them."""
    alike = [
        [replace(token, o=token.b + (0.25 if place < 2 else 1.0)) for place, token in enumerate(row)] for row in BATCH
    ]
    least = {id(token) for row in alike for token in taken(row)[:2] if abs(token.o - token.b) < 0.5}
    assert 1 < len(least) < sum(map(len, map(taken, alike)))
    expect_m2po(1e-3, alike, least)


@pytest.mark.parametrize("preset", [name for name, p in PRESETS.items() if "dual_clip" in p.parameters])
def test_golden_dual_clip(preset):
    def formula(token, row):
        low, high = (0.2, 0.28) if preset == "dapo" else (0.2, 0.2)
        if token.a < 0 and token.r > 3.0:
            return -3.0 * token.a, 0.0
        return clip_form(token.r, token.a, low, high)

    result = expect(
        preset, formula, {"dual_clip": 3.0, **needed(preset)}, aggregation=AGGREGATIONS.get(preset, "token")
    )
    assert result["metrics"]["dual_clip_fraction"] == pytest.approx(1 / 13)


def weighted(weight):
    return lambda token, row: (-weight(token) * token.a * token.t, -weight(token) * token.a)


def kept(condition):
    return lambda token, row: (-token.q * token.a, -token.q * token.a) if condition(token) else (0.0, 0.0)


def rise(token: Token) -> float:
    return math.exp(token.t) - math.exp(token.b)


def sapo(tau_pos: float, tau_neg: float):
    def formula(token, row):
        tau = tau_pos if token.a > 0 else tau_neg
        gate = 1 / (1 + math.exp(-tau * (token.r - 1)))
        return -4 / tau * gate * token.a, -4 * gate * (1 - gate) * token.r * token.a

    return formula


OTHER_PARAMETERS = {
    "aipo": ({"delta": 1.2}, weighted(lambda token: min(token.q, 1.2))),
    "rloo": ({"cap": 1.2}, weighted(lambda token: min(token.q, 1.2))),
    "opo": ({"cap": 0.5}, weighted(lambda token: min(token.q, 0.5))),
    "cispo": ({"eps_low": 0.5, "eps_high": 0.2}, weighted(lambda token: min(max(token.r, 0.5), 1.2))),
    "dapo": ({"eps_low": 0.6, "eps_high": 9.0}, lambda token, row: clip_form(token.r, token.a, 0.6, 9.0)),
    "dppo": (
        {"low": 0.01, "high": 0.05},
        kept(lambda token: not (token.a > 0 and rise(token) > 0.05) and not (token.a < 0 and -rise(token) > 0.01)),
    ),
    "ipo_mask": ({"threshold": 0.03}, kept(lambda token: abs(rise(token)) <= 0.03)),
    "icepop": ({"low": 0.95, "high": 1.2}, kept(lambda token: 0.95 <= token.q <= 1.2)),
    "sapo": ({"tau_pos": 2.0, "tau_neg": 0.5}, sapo(2.0, 0.5)),
}


@pytest.mark.parametrize("preset", OTHER_PARAMETERS)
def test_golden_with_other_parameters(preset):
    params, formula = OTHER_PARAMETERS[preset]
    expect(preset, formula, params, aggregation=AGGREGATIONS.get(preset, "token"))


@pytest.mark.parametrize(
    ("correction", "weight"),
    [({"kind": "none"}, lambda token: 1.0), ({"kind": "token_tis", "cap": 1.1}, lambda token: min(token.rho, 1.1))],
    ids=["none", "token_tis"],
)
def test_golden_loglinear_proximal_policy(correction, weight):
    """log o = b + a (t - b), a = (age - 1) / age, constant in t: the gradient flows through t alone."""
    versions = [[3, 4, 5, 6, 7, 8, 8], [8, 7, 5, 2, 0], [6, 6, 6], [1]]

    def share(version: int) -> float:
        age = 8 - version
        return max(age - 1, 0) / age if age else 0.0

    batch = [
        [
            Token(**{**vars(token), "o": token.b + share(version) * (token.t - token.b)})
            for token, version in zip(row, row_versions, strict=True)
        ]
        for row, row_versions in zip(BATCH, versions, strict=True)
    ]

    def formula(token, row):
        value, slope = clip_form(token.r, token.a, 0.2, 0.28)
        return weight(token) * value, weight(token) * slope

    case = _with_versions(versions, correction)
    result = result_of(case)
    tokens = [(token, row) for row in batch for token in row]
    flat = [formula(token, row) if token.taken else (0.0, 0.0) for token, row in tokens]
    assert result["loss"] == pytest.approx(sum(value for value, _ in flat) / 13, rel=1e-12)
    assert [g for row in result["grad"] for g in row] == pytest.approx([slope / 13 for _, slope in flat], rel=1e-12)


def _with_versions(versions: list[list[int]], correction: dict) -> dict:
    case = as_case("dapo", {"proximal": "loglinear", "correction": correction})
    sequences = [each | {"versions": row} for each, row in zip(case["sequences"], versions, strict=True)]
    return case | {"version": 8, "sequences": sequences}
