"""The objectives once more, in plain floats and with derivatives taken by hand: the other route to every golden number.

Nothing here comes from the package under test. A formula maps a token and its sequence to (loss, d loss / d log t).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["BATCH", "FORMULAS", "Formula", "Row", "Token", "aggregated", "as_case", "clip_form"]


@dataclass(frozen=True)
class Token:
    """The logarithms of one token, and its advantage."""

    t: float
    b: float
    o: float
    ref: float
    teacher: float
    a: float
    taken: bool = True

    @property
    def q(self) -> float:
        return math.exp(self.t - self.b)

    @property
    def r(self) -> float:
        return math.exp(self.t - self.o)

    @property
    def rho(self) -> float:
        return math.exp(self.o - self.b)


Row = list[Token]
Formula = Callable[[Token, Row], tuple[float, float]]


def _row(
    behaviour: Sequence[float], ratios: Sequence[float], rhos: Sequence[float], advantages: Sequence[float]
) -> Row:
    """Tokens with t / b = ratio and o / b = rho; tokens with an advantage of NaN are not in the loss."""
    return [
        Token(
            t=b + math.log(q),
            b=b,
            o=b + math.log(rho),
            ref=b + 0.3 * math.sin(3 * b),
            teacher=b - 0.5 * math.cos(5 * b),
            a=0.0 if math.isnan(a) else a,
            taken=not math.isnan(a),
        )
        for b, q, rho, a in zip(behaviour, ratios, rhos, advantages, strict=True)
    ]


OUT = math.nan
BATCH: list[Row] = [
    # t / b: 0.3 .. 6 lies below, inside and above every bound of every preset, at both signs of the advantage.
    _row(
        [-0.9, -1.0, -0.3, -2.0, -3.0, -4.0, -1.2],
        [1.0, 0.3, 0.9, 1.1, 1.5, 6.0, 1.0],
        [1.0, 0.6, 1.2, 0.9, 1.4, 2.5, 7.0],
        [OUT, 2.0, 2.0, 2.0, 2.0, 2.0, OUT],
    ),
    _row(
        [-1.5, -0.2, -2.5, -3.5, -5.0],
        [0.3, 0.9, 1.1, 1.5, 6.0],
        [0.4, 1.1, 1.0, 3.0, 0.7],
        [-0.5, -0.5, -0.5, -0.5, -0.5],
    ),
    _row([-0.25, -0.4, -0.7], [0.98, 1.02, 1.0], [1.0, 1.0, 0.999], [1.0, -1.0, OUT]),
    _row([-2.2], [1.3], [1.003], [-3.0]),
]
GROUPS = ["g", "g", "h", ""]


def taken(row: Row) -> Row:
    return [token for token in row if token.taken]


def clip_form(ratio: float, a: float, low: float, high: float) -> tuple[float, float]:
    """-min(ratio a, clip(ratio) a) and its slope in the logarithm of the ratio."""
    value = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    is_flat = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
    return value, 0.0 if is_flat else -ratio * a


def _clip(low: float, high: float) -> Formula:
    return lambda token, row: clip_form(token.r, token.a, low, high)


def _weighted(weight: Callable[[Token], float]) -> Formula:
    """A constant weight times -A log t."""
    return lambda token, row: (-weight(token) * token.a * token.t, -weight(token) * token.a)


def _masked(keeps: Callable[[Token], bool]) -> Formula:
    """-q A where it is kept."""
    return lambda token, row: (-token.q * token.a, -token.q * token.a) if keeps(token) else (0.0, 0.0)


def _gspo(token: Token, row: Row) -> tuple[float, float]:
    sequence = math.exp(sum(each.t - each.o for each in taken(row)) / len(taken(row)))
    return clip_form(sequence, token.a, 3e-4, 4e-4)


def _dppo(token: Token) -> bool:
    rise = math.exp(token.t) - math.exp(token.b)
    return not ((token.a > 0 and rise > 0.2) or (token.a < 0 and -rise > 0.2))


def _sapo(token: Token, row: Row) -> tuple[float, float]:
    tau = 1.0 if token.a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (token.r - 1)))
    return -4 / tau * gate * token.a, -4 * gate * (1 - gate) * token.r * token.a


FORMULAS: dict[str, Formula] = {
    "aipo": _weighted(lambda token: min(token.q, 4.0)),
    "grpo": _clip(0.2, 0.2),
    "dapo": _clip(0.2, 0.28),
    "dr_grpo": _clip(0.2, 0.2),
    "gspo": _gspo,
    "rloo": _weighted(lambda token: min(token.q, 2.0)),
    "opo": _weighted(lambda token: min(token.q, 2.0)),
    "cispo": _weighted(lambda token: min(max(token.r, 0.0), 5.0)),
    "ppo": _clip(0.2, 0.2),
    "reinforce_pp": _clip(0.2, 0.2),
    "dppo": _masked(_dppo),
    "ipo_mask": _masked(lambda token: abs(math.exp(token.t) - math.exp(token.b)) <= 0.1),
    "icepop": _masked(lambda token: 0.5 <= token.q <= 5.0),
    "sapo": _sapo,
    "m2po": _clip(0.2, 0.2),
    "sft": lambda token, row: (-token.t, -1.0),
    "distill": lambda token, row: (-(token.teacher - token.t) * token.t, -(token.teacher - token.t)),
}
"""Preset -> loss and slope per token, with the defaults of docs/objectives.md."""


def aggregated(
    aggregation: str, losses: list[list[tuple[float, float]]], batch: list[Row] = BATCH, max_tokens: int = 10
) -> tuple[float, list[list[float]]]:
    """One loss and the gradient of every token, from losses and slopes of all tokens (0 for those not taken)."""
    counts = [len(taken(row)) for row in batch]
    names = [group or str(index) for index, group in enumerate(GROUPS[: len(batch)])]
    of_group = {name: sum(c for c, other in zip(counts, names, strict=True) if other == name) for name in names}
    shares = {
        "token": [1 / sum(counts)] * len(batch),
        "sequence": [1 / (count * len(batch)) for count in counts],
        "prompt": [1 / (of_group[name] * len(of_group)) for name in names],
        "constant": [1 / (len(batch) * max_tokens)] * len(batch),
    }[aggregation]
    value = sum(share * loss for share, row in zip(shares, losses, strict=True) for loss, _ in row)
    return value, [[share * slope for _, slope in row] for share, row in zip(shares, losses, strict=True)]


def of_tokens(formula: Formula, batch: list[Row] = BATCH) -> list[list[tuple[float, float]]]:
    return [[formula(token, row) if token.taken else (0.0, 0.0) for token in row] for row in batch]


def as_case(preset: str, params: dict | None = None, *, proximal: bool = False, batch: list[Row] = BATCH) -> dict:
    """The same numbers as `sluice objective` reads them."""
    sequences = [
        {
            "logp": [token.t for token in row],
            "behaviour_logp": [token.b for token in row],
            "ref_logp": [token.ref for token in row],
            "teacher_logp": [token.teacher for token in row],
            "advantage": [token.a for token in row],
            "mask": [int(token.taken) for token in row],
            "group_id": group,
        }
        | ({"proximal_logp": [token.o for token in row]} if proximal else {})
        for row, group in zip(batch, GROUPS, strict=False)
    ]
    return {"preset": preset, "params": params or {}, "sequences": sequences}
