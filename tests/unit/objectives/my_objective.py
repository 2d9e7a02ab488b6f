"""An objective as a user writes it: named by its import path, `my_objective:squared_ratio`."""

from trainer_svc.objectives.presets import TokenLosses, TokenTerms, log_difference


def squared_ratio(terms: TokenTerms, *, strength: float = 1.0) -> TokenLosses:
    """-strength r^2 A / 2, and how many ratios are above 1."""
    ratio = log_difference(terms.current, terms.proximal).exp()
    return -strength * ratio.square() * terms.advantages / 2, {"above_one": (ratio > 1).sum()}


def with_options(terms: TokenTerms, *, strength: float, side: str, hard: bool) -> TokenLosses:
    """Takes parameters of every type that a TOML table has."""
    return -strength * terms.current * float(hard and side == "low"), {}


def already_summed(terms: TokenTerms) -> TokenLosses:
    """What a surrogate must not do."""
    return terms.current.sum(), {}


NOT_A_FUNCTION = 3
