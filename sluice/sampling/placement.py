"""Which replica a request goes to: the replica that has its prefix in the cache, or the least loaded one if that has much less to do. Pure.

The samples of a group share a prompt, and each turn of an episode begins with the turns before it. The replica that sampled these
holds their keys and values, and need not compute them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_PLACES = 64
"""Samples that a replica is assumed to take at a time if it does not say how many."""

MOST_HOMES = 1 << 16
"""Maximum number of groups and episodes whose replica is remembered. Beyond it, the least recently used one is forgotten."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much one replica has to do.

    Attributes:
        target: Its address.
        samples: Samples queued or running there, of all clients.
        places: Samples that it is given at a time; 0 if unknown.
    """

    target: str
    samples: int
    places: int

    @property
    def share(self) -> float:
        """Samples divided by places."""
        return self.samples / (self.places or _PLACES)


def place(loads: Sequence[Load], home: str, margin: float) -> str:
    """Return `home` if its share is at most `margin` above the share of the least loaded replica; otherwise the target of that replica.

    If all places of the home are taken and the other one has free places, return the other one.

    Raises:
        ValueError: if there is no replica.
    """
    least = min(loads, key=lambda each: each.share)
    at_home = next((each for each in loads if each.target == home), least)
    is_full = at_home.share >= 1 > least.share
    return least.target if is_full or at_home.share > least.share + margin else at_home.target


class Homes:
    """Remembers which replica has the prefix of each group and each episode.

    Args:
        most: Maximum number of keys to remember.
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
        """Note where a request went. Its first key, the most specific one, now has its prefix there. Other keys keep their replicas."""
        for number, key in enumerate(keys):
            if number == 0:
                self._targets[key] = target
            else:
                self._targets.setdefault(key, target)
            self._targets.move_to_end(key)
        while len(self._targets) > self._most:
            self._targets.popitem(last=False)

    def forget(self, target: str) -> None:
        """Forget a replica: it is gone, or comes back with an empty cache."""
        for key in [key for key, home in self._targets.items() if home == target]:
            del self._targets[key]
