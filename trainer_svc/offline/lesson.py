"""What a kind of offline training minimises and reports: a loss over micro-batches, and figures of its sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer_svc.engine.outputs import LossFn, LossWeight

__all__ = ["Lesson"]


def _nothing(_: Mapping[str, float]) -> dict[str, float]:
    return {}


@dataclass(frozen=True, slots=True)
class Lesson:
    """One kind of training.

    Attributes:
        loss: Sum of the losses of a micro-batch, and sums for the report.
        weight: What the summed loss is divided by.
        figures: Means for the report out of the sums over any number of steps.
        whole_groups: Whether the loss compares the rows of a group.
    """

    loss: LossFn
    weight: LossWeight
    figures: Callable[[Mapping[str, float]], dict[str, float]] = _nothing
    whole_groups: bool = False
