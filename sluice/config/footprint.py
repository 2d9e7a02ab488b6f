"""How much memory a service needs, estimated before it starts. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from sluice.errors import ConfigError

GIB = 1 << 30

USABLE = 0.92
"""Share of a device's memory that estimates may fill. The rest is CUDA's own, fragmentation, and buffers of communication. It is also what
vLLM takes of a device for itself unless a setting says another share."""


STEP = 256
"""Tokens to whose multiple the length of a sample is rounded down."""


def most_that_fit(needed: Callable[[int], float], most: int, capacity: float) -> int:
    """Return the largest multiple of `STEP` below `most` tokens for which no more bytes are needed than there are; 0 if there is none.

    Args:
        needed: Bytes for so many tokens; more for more.
        most: Tokens that do not fit.
        capacity: Bytes of a device that may be used.
    """
    return bisect.bisect_right(range(STEP, most, STEP), capacity, key=needed) * STEP


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a service at its peak.

    Attributes:
        what: What needs it, as the subject of a message: ``a training step``.
        device: Bytes on each device; of main memory for each process if it computes on the CPU.
        parts: What they are for, in words.
        host: Further bytes of main memory for one instance on one machine.
        host_of_process: Further bytes of main memory for each process that computes.
        remedy: What to do if they are too many.
        share: Share of a device's memory that it may use.
        capacity: Bytes of a device, where the settings say how many it has.
    """

    what: str
    device: int
    parts: str
    host: int
    remedy: str
    share: float = 1.0
    capacity: float | None = None
    host_of_process: int = 0

    def check(self, capacity: float | None) -> None:
        """Refuse a device that is too small.

        Args:
            capacity: Bytes of a device, unless the settings say it; None if they are not known.

        Raises:
            ConfigError: with the numbers and the remedy.
        """
        capacity = self.capacity if self.capacity is not None else capacity
        if capacity is None or self.device <= capacity * self.share:
            return
        usable = "" if self.share == 1 else f", of which it may use {self.share:g}"
        raise ConfigError(
            f"{self.what} is estimated to need {self.device / GIB:.1f} GiB ({self.parts}) on each device, which has"
            f" {capacity / GIB:.1f} GiB{usable}: {self.remedy}"
        )
