"""Which replica a request goes to: the least loaded one, or the one that has its prefix unless that has much more to do.

Pure. The samples of a group share a prompt, and each turn of an episode begins with the turns before it. The replica that sampled
them holds their keys and values, and need not compute them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_PLACES = 64
"""Samples that are given at a time to a replica which does not say how many it generates."""

MOST_HOMES = 1 << 16
"""Groups and episodes whose replica is remembered; beyond them the least recently used one is forgotten."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much one replica has to do.

    Attributes:
        target: Its address.
        samples: Samples that are queued or generated there, for whomever.
        places: Samples that it is given at a time; 0 if it is not known.
    """

    target: str
    samples: int
    places: int

    @property
    def share(self) -> float:
        """Samples by places."""
        return self.samples / (self.places or _PLACES)


def place(loads: Sequence[Load], home: str, margin: float) -> str:
    """Return the target of the least loaded replica, or `home` if its share is at most `margin` above that.

    A home that has all its places taken is no home while the other one has places left.

    Raises:
        ValueError: if there is no replica.
    """
    least = min(loads, key=lambda each: each.share)
    at_home = next((each for each in loads if each.target == home), least)
    is_full = at_home.share >= 1 > least.share
    return least.target if is_full or at_home.share > least.share + margin else at_home.target


class Homes:
    """The replica that has the prefix of each group and each episode.

    Args:
        most: Keys that are remembered at a time.
    """

    def __init__(self, most: int = MOST_HOMES) -> None:
        self._targets: OrderedDict[str, str] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._targets)

    def find(self, keys: Iterable[str]) -> str:
        """Return the replica of the first key that has one; empty if none has."""
        return next((self._targets[key] for key in keys if key in self._targets), "")

    def remember(self, keys: Sequence[str], target: str) -> None:
        """Note where a request went. Its first key, the most specific one, has its prefix there now; the others keep theirs."""
        for number, key in enumerate(keys):
            if number == 0:
                self._targets[key] = target
            else:
                self._targets.setdefault(key, target)
            self._targets.move_to_end(key)
        while len(self._targets) > self._most:
            self._targets.popitem(last=False)

    def forget(self, target: str) -> None:
        """Forget a replica: it is gone, or whatever comes back has no prefix."""
        for key in [key for key, home in self._targets.items() if home == target]:
            del self._targets[key]
