"""How a golden test compares: value and gradient of every token, in float64."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from by_hand import BATCH, Formula, Row, aggregated, as_case, of_tokens

from trainer_svc.objectives.evaluate import Case, evaluate

__all__ = ["bypassed", "expect", "result_of"]


def result_of(case: dict) -> dict:
    """What the package makes of a case."""
    return evaluate(Case.parse(json.dumps(case)))


def bypassed(batch: list[Row]) -> list[Row]:
    """The same tokens with o = b."""
    return [[replace(token, o=token.b) for token in row] for row in batch]


def expect(
    preset: str,
    formula: Formula,
    params: dict | None = None,
    *,
    aggregation: str = "token",
    proximal: bool = False,
    batch: list[Row] = BATCH,
) -> dict:
    """Compare the package with a formula; gives the package's result for further questions."""
    by_hand = batch if proximal else bypassed(batch)
    value, gradient = aggregated(aggregation, of_tokens(formula, by_hand), by_hand)
    result = result_of(as_case(preset, params, proximal=proximal, batch=batch))
    assert result["loss"] == pytest.approx(value, rel=1e-12, abs=1e-14)
    assert [len(row) for row in result["grad"]] == [len(row) for row in gradient]
    for got, wanted in zip(result["grad"], gradient, strict=True):
        assert got == pytest.approx(wanted, rel=1e-12, abs=1e-14)
    return result
