"""The table of objectives. A new one is a row here, plus at most one surrogate; this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = ["PRESETS", "Aggregation", "KlKind", "Preset", "preset_names"]

Aggregation = Literal["token", "sequence", "prompt", "constant"]
KlKind = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class Preset:
    """One objective as independent choices.

    Attributes:
        advantage: The estimator of `sluice.advantages` that it was published with.
        surrogate: Name of the loss per token in `trainer_svc.objectives.surrogates`.
        aggregation: How token losses become one number.
        parameters: The surrogate's parameters with their defaults; others are refused.
        needs_behaviour: Whether it reads the behaviour policy's log-probabilities.
        source: Where it comes from.
    """

    advantage: str
    surrogate: str
    aggregation: Aggregation
    parameters: Mapping[str, float]
    needs_behaviour: bool
    source: str


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "aipo": Preset("centered", "truncated_importance", "token", {"delta": 4.0}, True, "arXiv 2505.24034"),
        "grpo": Preset(
            "grpo", "clipped_ratio", "sequence", {"eps_low": 0.2, "eps_high": 0.2}, True, "arXiv 2402.03300"
        ),
        "sft": Preset("", "negative_log_likelihood", "token", {}, False, "maximum likelihood on demonstrations"),
    }
)


def preset_names() -> list[str]:
    """Names of the presets, in the order of the table."""
    return list(PRESETS)
