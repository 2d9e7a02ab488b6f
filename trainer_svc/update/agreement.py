"""What one rank refuses is refused by all, lest the others wait for it in the next sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trainer_svc.parallel.ranks import Ranks

__all__ = ["agreed"]

T = TypeVar("T")


def agreed(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do what each rank does by itself, and go on where all of them could.

    Args:
        ranks: All ranks that have a share; every one of them calls this.
        work: Exchanges nothing with the other ranks.

    Raises:
        ValueError: if `work` raised it on this rank or on another one.
        RuntimeError: if a rank is gone or does not answer within the group's timeout.
    """
    refusal: ValueError | None = None
    try:
        done = work()
    except ValueError as error:
        refusal = error  # raised when the other ranks know
    refusals = ranks.total({"refused": float(refusal is not None)})["refused"]
    if refusal is not None:
        raise refusal
    if refusals:
        raise ValueError("another rank refused its share of the batch: its own error says why")
    return done
