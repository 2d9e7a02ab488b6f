"""How much memory a service needs, estimated before it starts. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from sluice.errors import ConfigError

GIB = 1 << 30

USABLE = 0.92
"""Fraction of a device's memory that estimates may fill. The rest is for CUDA itself, fragmentation, and communication buffers. It is also
the fraction of a device that vLLM takes, unless a setting says otherwise."""


STEP = 256
"""The length of a sample in tokens is rounded down to a multiple of this."""


def most_that_fit(needed: Callable[[int], float], most: int, capacity: float) -> int:
    """Return the largest multiple of `STEP` below `most` tokens that needs at most `capacity` bytes; 0 if there is none.

    Args:
        needed: Returns the bytes for a number of tokens. Must not decrease with that number.
        most: A number of tokens that does not fit.
        capacity: Bytes of a device that may be used.
    """
    return bisect.bisect_right(range(STEP, most, STEP), capacity, key=needed) * STEP


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a service at its peak.

    Attributes:
        what: What needs it, as the subject of a message: ``a training step``.
        device: Bytes on each device. If it computes on the CPU: bytes of main memory for each process.
        parts: What the bytes of `device` are for, in words.
        host: Further bytes of main memory for one instance on one machine.
        host_of_process: Further bytes of main memory for each process that computes.
        remedy: What to do if the memory is not enough.
        share: Fraction of a device's memory that it may use.
        capacity: Bytes of a device, if the settings say that.
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
            capacity: Bytes of a device; None if unknown. `self.capacity` takes precedence.

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
